"""Which waits does the runtime miss? A test double of a device, with CUDA's semantics, that does its work late."""
