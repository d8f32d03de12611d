"""Gradients that arrive again while they are in one of DeepSpeed's reduction buckets.

A layer that is used several times under reentrant checkpointing has a backward of its own for each use, and its
gradient arrives as often. If the first is still in the bucket then, autograd adds the next one to it in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from deep_opt_states.zero.internals.compat import Parameter


class Buckets:
    """The parameters of ``optimizer`` whose gradients are in a bucket and have not been reduced yet."""

    def __init__(self, optimizer: Any) -> None:
        self._stream = optimizer.reduce_and_partition_stream
        self._addresses: dict[int, int] = {}
        """Where each gradient lies, by ``ds_id``."""
        if self._stream is not None:
            # DeepSpeed removes the hooks together with its own when the engine is destroyed.
            optimizer._grad_acc_hooks.extend(
                param.register_hook(partial(self._before_adding, param))
                for group in optimizer.fp16_groups
                for param in group
                if param.requires_grad
            )

    def has(self, param: Parameter) -> bool:
        """Return whether the parameter's gradient is in a bucket now.

        After a backward that raised half way, the bucket may hold a gradient that the caller has dropped since; the
        one that autograd makes next lies elsewhere.
        """
        address = self._addresses.get(param.ds_id)
        return address is not None and param.grad is not None and param.grad.data_ptr() == address

    def note(self, param: Parameter) -> None:
        """Remember that DeepSpeed has put the gradient into a bucket, unless it waits for more of it."""
        if getattr(param, "ds_grad_is_ready", True) and param.grad is not None:
            self._addresses[param.ds_id] = param.grad.data_ptr()

    def reduced(self, params: Iterable[Parameter]) -> None:
        """Forget these: DeepSpeed takes them out of the bucket."""
        for param in params:
            self._addresses.pop(param.ds_id, None)

    def added_to(self) -> None:
        """Let the reduction wait for what autograd has just added to a gradient in a bucket."""
        if self._stream is not None:
            self._stream.wait_stream(get_accelerator().current_stream())

    def wait_for_copy(self) -> None:
        """Let autograd wait until the gradient is in the bucket: it is copied there on the reduction's stream."""
        get_accelerator().current_stream().wait_stream(self._stream)

    def _before_adding(self, param: Parameter, gradient: torch.Tensor) -> None:
        """Order what autograd is about to do: PyTorch calls this hook before it adds to the parameter's gradient, on
        the stream on which it does so."""
        if self.has(param):
            self.wait_for_copy()
