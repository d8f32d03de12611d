"""Adam kernels for the CPU and the GPU. All of them implement the protocol ``adam.AdamKernel``."""
