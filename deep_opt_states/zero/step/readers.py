"""Attributes of stock's optimizer that nobody sees while an update is under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Guarded:
    """``wait(optimizer)`` before the attribute is read: what it leads to may then be read, and written to."""

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


def lent(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, under a storage that is the borrower's.

    What PyTorch sends to another process it moves to shared memory, the storage with it: the states would leave the
    slab for good when a decoupled checkpoint engine saves them. So it is the borrower's that moves, with a copy, which
    no later update changes.
    """
    if not tensor.is_cpu:
        # Sent as a handle to where it is; DeepSpeed waits before its next step until what it has sent is written.
        return tensor
    borrowed = torch.from_numpy(tensor.detach().numpy()).requires_grad_(tensor.requires_grad)
    # DeepSpeed's numbers of the parameters in it, which are saved too.
    vars(borrowed).update(vars(tensor))
    return borrowed
