"""Does training beside tensor parallelism, by AutoTP or by a Megatron-style ``mpu``, have the bits of stock?"""
