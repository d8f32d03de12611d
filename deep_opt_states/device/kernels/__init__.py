"""Adam kernels, all with the signature of ``adam.AdamKernel``."""
