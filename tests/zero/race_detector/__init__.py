"""Which accesses of the real ZeRO-3 engine are not ordered? It runs on CPU tensors, and its streams and events record.

Every operation is executed at once, in the order in which the host issues it, so the numbers are right. The record
shows the races that a GPU could run into: two accesses to the same memory, at least one of them a write, that are
ordered neither by a stream nor by an event nor by a wait of the host (happens-before, by vector clocks).

Reads of host memory that bypass PyTorch's dispatcher (``tolist``, ``numpy``, ``torch.save``) are not detected. Copies
of tensors that are not contiguous are treated like copies of contiguous ones.
"""
