"""What the runtime needs of a machine: streams, events, memory and Adam kernels. Knows torch, never a plan."""
