"""Do our Adam kernels have the bits of stock's op?"""
