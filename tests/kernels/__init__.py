"""Are our Adam kernels bit-identical to stock's op?"""
