"""A device whose work happens late: CUDA's semantics on the CPU, for finding races without a GPU."""
