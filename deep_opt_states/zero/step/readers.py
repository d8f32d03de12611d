"""Let readers of DeepSpeed's optimizer see states and parameters only while no update works on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class WaitsBeforeRead:
    """An attribute of an optimizer that calls ``wait(optimizer)`` before it is read, also to write to its tensors."""

    def __init__(self, wait: Callable[[Any], None]) -> None:
        self._wait = wait

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, owner: type) -> Any:
        self._wait(optimizer)
        try:
            return vars(optimizer)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None

    def __set__(self, optimizer: Any, value: Any) -> None:
        vars(optimizer)[self._name] = value


def checkpoint_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the same memory that a checkpoint engine may send to another process.

    PyTorch moves the storage of a sent tensor to shared memory: states would leave the slab. The result has its own.
    """
    if not tensor.is_cpu:
        # PyTorch sends a handle to GPU memory, and DeepSpeed's next step waits until the data is written.
        return tensor
    values = tensor.detach()
    # NumPy has no bf16.
    as_numpy = values.view(torch.int16) if values.dtype == torch.bfloat16 else values
    view = torch.from_numpy(as_numpy.numpy()).view(values.dtype).requires_grad_(tensor.requires_grad)
    # DeepSpeed also saves the attributes with ids of parameters that it has set.
    vars(view).update(vars(tensor))
    return view
