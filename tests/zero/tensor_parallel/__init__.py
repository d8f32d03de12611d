"""Is training with tensor parallelism, by AutoTP or by a Megatron-style ``mpu``, bit-identical to stock?"""
