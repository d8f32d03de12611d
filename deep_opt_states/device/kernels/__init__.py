"""How is Adam computed on the CPU and on the GPU, with the same bits? All kernels implement ``adam.AdamKernel``."""
