"""An accelerator that records: the real ZeRO-3 engine runs on CPU tensors, its streams and events only take notes.

Everything is computed at once, in the order in which the host issues it, so the numbers are right. What could have
gone wrong on a GPU is decided from the notes: two accesses to the same memory, one of them a write, that neither a
stream's order nor an event nor a wait of the host puts one after the other (happens-before, by vector clocks).

What is not seen: reads of host memory that bypass PyTorch's dispatcher (``tolist``, ``numpy``, ``torch.save``). Copies
of tensors that are not contiguous are taken for plain ones.
"""
