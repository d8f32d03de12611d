"""A test double of a device: it has CUDA's semantics on the CPU and does its work late, to find races without a GPU."""
