"""Provide streams, events, memory and Adam kernels to the runtime. This package knows torch, but no plan."""
