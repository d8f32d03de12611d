"""Which streams, events, memory and Adam kernels does each kind of device provide? No plan is known here."""
