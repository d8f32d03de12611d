"""Provide streams, events, memory and Adam kernels to the runtime. This package depends on torch, but not on plans."""
