"""Handle gradients that autograd adds to in place while they are in one of DeepSpeed's reduction buckets.

Reentrant checkpointing computes several gradients for a layer that is used several times.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from deep_opt_states.zero.internals.compat import Parameter, add_grad_hooks, drop_gradients_in_buckets


class Buckets:
    """The parameters of ``optimizer`` whose gradients are in a bucket and have not been reduced yet."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._stream = optimizer.reduce_and_partition_stream
        self._addresses: dict[int, int] = {}
        if self._stream is not None:
            handles = (
                param.register_hook(partial(self._before_adding, param))
                for group in optimizer.fp16_groups
                for param in group
                if param.requires_grad
            )
            add_grad_hooks(optimizer, handles)

    @property
    def have_gradients(self) -> bool:
        """Return whether gradients wait for their reduction; between two backwards, only after an error."""
        return bool(self._addresses)

    def discard(self) -> None:
        """Drop all gradients that have not been reduced. No copy into a bucket is in flight."""
        self._addresses.clear()
        drop_gradients_in_buckets(self._optimizer)

    def contains(self, param: Parameter) -> bool:
        """Return whether the parameter's gradient itself is in a bucket now, and not one that an error has dropped."""
        address = self._addresses.get(param.ds_id)
        return address is not None and param.grad is not None and param.grad.data_ptr() == address

    def record(self, param: Parameter) -> None:
        """Record that DeepSpeed has put the gradient into a bucket, unless more of it is expected first."""
        if getattr(param, "ds_grad_is_ready", True) and param.grad is not None:
            self._addresses[param.ds_id] = param.grad.data_ptr()

    def remove(self, params: Iterable[Parameter]) -> None:
        """Discard the gradients of ``params``, which DeepSpeed takes out of the bucket."""
        for param in params:
            self._addresses.pop(param.ds_id, None)

    def wait_for_addition(self) -> None:
        """Make the reduction stream wait for autograd's last addition to a gradient in a bucket."""
        if self._stream is not None:
            self._stream.wait_stream(get_accelerator().current_stream())

    def wait_for_copy(self) -> None:
        """Make autograd's stream wait until the gradient is copied into the bucket, on the reduction stream."""
        get_accelerator().current_stream().wait_stream(self._stream)

    def _before_adding(self, param: Parameter, gradient: torch.Tensor) -> None:
        if self.contains(param):
            self.wait_for_copy()
