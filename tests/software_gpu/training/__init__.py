"""Is training on an asynchronous device with memory of its own bit-identical to stock on the CPU?"""
