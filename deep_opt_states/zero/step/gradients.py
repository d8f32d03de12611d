"""The path of gradients: reduced on the accelerator, kept where their sub-group is updated, moved at most once.

The gradient of a parameter is the sum of what arrived for it since the last step, and zero if nothing did. Stock
departs from that when a parameter gets no gradient in some backward: at the step it reuses what the fp32 buffer held,
which is the previous step's scaled gradient, and a sum over micro-batches continues the previous window's.

It departs from that, too, when a gradient is reduced more than once in one backward, as that of a layer which is used
several times under reentrant checkpointing: each arrival overwrites the ones before it, or an assertion fails because
the parameter is in the bucket twice (see ``buckets.py``). Here they are added up, as PyTorch does without ZeRO. These
are the two places where we do not follow stock to the bit.

Stock moves a gradient down in the accumulation dtype, up again, and down in fp32. Here it stays in the accumulation
dtype: one that users set is in fp32 from then on, until backward writes it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from deep_opt_states.runtime.staging import Staging, Traffic
from deep_opt_states.zero.internals.compat import Parameter, sees_gradients


@dataclass(frozen=True, kw_only=True)
class Home:
    """Of a sub-group's gradients, shape [numel] in the accumulation dtype.

    ``grad`` is where the update reads them. ``accumulator``, on the accelerator, sums them over micro-batches if
    ``grad`` is in host memory and there is room; None otherwise.
    """

    grad: torch.Tensor
    accumulator: torch.Tensor | None = None

    @property
    def sums(self) -> torch.Tensor:
        return self.grad if self.accumulator is None else self.accumulator


class Gradients:
    """``homes`` of the sub-groups in DeepSpeed's order, zero at first.

    ``staging`` is how gradients get to host memory; None where the accelerator shares it, or where none go there.
    """

    def __init__(self, optimizer: Any, homes: Sequence[Home], staging: Staging | None) -> None:
        self._optimizer = optimizer
        self._homes = homes
        self._staging = staging
        self._sums_have_arrived = False
        """Whether the current stream waits for all sums in host memory that the bucket at hand may be added to."""
        self._in_fp32: dict[int, torch.Tensor] = {}
        """What users have set, or may set, by parameter; it counts instead of the home."""
        self._written: dict[int, Parameter] = {}
        """Written since the last step, by backward or by the user."""
        self._stale: dict[int, Parameter] = {}
        """Written for an earlier step, and not since."""
        self._summed: dict[int, Parameter] = {}
        """The parameters with a gradient in this window: what arrives for them next is added."""
        self._unscaled: dict[int, float] = {}
        """Our kernels only read gradients: these still lack the factor that stock multiplies in before Adam."""

    # Backward

    @property
    def traffic(self) -> Traffic:
        """Return what was copied so far; nothing where the accelerator shares host memory."""
        return Traffic() if self._staging is None else self._staging.traffic

    @torch.no_grad()
    def reduced(self, params: Sequence[Parameter], partitions: Sequence[torch.Tensor]) -> None:
        """One bucket of reduced gradients, shape [partition_numel] or less each, on the reduction's stream."""
        optimizer = self._optimizer
        boundary = optimizer.is_gradient_accumulation_boundary()
        self._sums_have_arrived = False
        # In the order of host memory, so that few copies go down.
        for param, partition in sorted(zip(params, partitions, strict=True), key=lambda pair: self._position(pair[0])):
            if sees_gradients(optimizer, param):
                first = param.ds_id not in self._summed
                self._summed[param.ds_id] = param
                total = self._add(param, partition, first, boundary)
                if boundary:
                    self._complete(param, total)
            # The partition may be the gradient itself: what reads it is issued by now.
            if param.grad is not None and not get_accelerator().is_synchronized_device():
                param.grad.record_stream(get_accelerator().current_stream())
            param.grad = None
        self._flush()

    def arrive(self) -> None:
        """What is issued on the current stream from now on finds the gradients in host memory, and a host that waits
        for it does."""
        if self._staging is not None:
            self._staging.arrive()

    def wait(self) -> None:
        """The host finds them there."""
        if self._staging is not None:
            self._staging.wait()

    def abandon_window(self) -> None:
        """Forget the sums of a window that is not complete, also of parameters that get no other gradient before the
        step. Gradients of a complete window count until backward writes others, as with stock."""
        self._stale |= {ds_id: param for ds_id, param in self._summed.items() if ds_id not in self._written}
        self._summed.clear()

    def finish_window(self) -> None:
        """Of a window that the user has delimited: what was reduced in it, none of it at a boundary."""
        for param in self._params():
            if param.ds_id in self._summed:
                self._finish(param)
        self._flush()

    def complete_window(self) -> None:
        """Before the norm: fill in the parameters that the last backward of the window did not reach."""
        for param in self._params():
            if param.ds_id in self._summed and param.ds_id not in self._written:
                self._finish(param)
        self._flush()
        for ds_id, param in self._stale.items():
            if ds_id not in self._written:
                self._forget_fp32(param)
                sub_group, view = self._place(param)
                view(self._homes[sub_group].grad).zero_()
        self._stale = self._written
        self._written = {}
        self._summed.clear()

    # Step

    def scaled_later(self, sub_group: int, grad_scale: float) -> None:
        """The sub-group was updated with ``grad_scale``, and its gradients were left as they are."""
        if grad_scale != 1.0:
            self._unscaled.update((param.ds_id, grad_scale) for param in self._optimizer.fp16_groups[sub_group])

    def home_of(self, sub_group: int) -> torch.Tensor:
        return self._homes[sub_group].grad

    def of_sub_group(self, sub_group: int) -> torch.Tensor:
        """What the update reads: the home, or a copy in fp32 if users may have set some of it."""
        home = self.home_of(sub_group)
        kept = [param for param in self._optimizer.fp16_groups[sub_group] if param.ds_id in self._in_fp32]
        if not kept:
            return home
        grad = home.float()
        for param in kept:
            _, view = self._place(param)
            view(grad).copy_(self._in_fp32[param.ds_id])
        return grad

    def close(self) -> None:
        """Let go of all memory, once nothing is copied to it."""
        if self._staging is not None:
            self._staging.close()
        self._homes = ()
        self._in_fp32.clear()

    # Readers and writers other than backward and the update

    def read(self, param: Parameter) -> torch.Tensor:
        """fp32, shape [partition_numel], as stock's buffer would be after all that has happened; nobody keeps it."""
        if param.ds_id in self._in_fp32:
            return self.in_fp32(param)
        partition = self._copied(param)
        grad_scale = self._unscaled.get(param.ds_id)
        return partition if grad_scale is None else partition.mul_(grad_scale)

    def in_fp32(self, param: Parameter) -> torch.Tensor:
        """Return the parameter's gradient in fp32 for the caller to write to.

        It counts as the gradient until backward writes another. It is in host memory, where stock's fp32 buffers are,
        wherever the sub-group is updated.
        """
        if param.ds_id not in self._in_fp32:
            self._in_fp32[param.ds_id] = self._copied(param).cpu()
        grad_scale = self._unscaled.pop(param.ds_id, None)
        if grad_scale is not None:
            self._in_fp32[param.ds_id].mul_(grad_scale)
        return self._in_fp32[param.ds_id]

    def set_by_user(self, params: Iterable[Parameter]) -> None:
        """A frozen one has no gradient to be set: as with stock, nothing has happened to it."""
        for param in params:
            if param.requires_grad:
                self._written[param.ds_id] = param

    def _add(self, param: Parameter, partition: torch.Tensor, first: bool, boundary: bool) -> torch.Tensor:
        """Return the sum so far, on the accelerator, and send it down if it is due in host memory.

        Nothing is allocated here: a sum in host memory is added to ``partition``, which nobody needs any more.
        """
        sub_group, view = self._place(param)
        home = self._homes[sub_group]
        sums = view(home.sums).narrow(0, 0, partition.numel())
        # A copy only if the dtypes differ, which DeepSpeed has seen to.
        partition = partition.view(-1).to(sums.dtype)
        if self._in_host_memory(sums):
            total = partition
            if not first:
                self._add_host_sums(total, sums)
        else:
            total = sums.copy_(partition) if first else sums.add_(partition)
        if boundary if home.accumulator is not None else self._in_host_memory(home.grad):
            self._send(param, total)
        return total

    def _add_host_sums(self, total: torch.Tensor, sums: torch.Tensor) -> None:
        """Bring them up: adding on the host would be slow."""
        assert self._staging is not None
        if not self._sums_have_arrived:
            self._staging.arrive()
            self._sums_have_arrived = True
        self._staging.add_to(total, sums)

    def _finish(self, param: Parameter) -> None:
        """The sum is complete, and was not known to be when it was last added to."""
        sub_group, view = self._place(param)
        home = self._homes[sub_group]
        total = view(home.sums)
        if self._in_host_memory(total):
            self.arrive()
            # After backward, one parameter at a time, for its norm.
            total = total.to(get_accelerator().current_device_name(), non_blocking=True)
            self.traffic.h2d_bytes += total.nbytes
            self.traffic.h2d_copies += 1
        elif home.accumulator is not None:
            self._send(param, total)
        self._complete(param, total)

    def _complete(self, param: Parameter, total: torch.Tensor) -> None:
        optimizer = self._optimizer
        optimizer.norm_for_param_grads[optimizer.get_param_id(param)] = optimizer._constant_buffered_norm2(total)
        self._written[param.ds_id] = param
        self._forget_fp32(param)

    def _forget_fp32(self, param: Parameter) -> None:
        self._in_fp32.pop(param.ds_id, None)
        self._unscaled.pop(param.ds_id, None)

    def _send(self, param: Parameter, total: torch.Tensor) -> None:
        """Copy the sum to host memory; ``_flush`` must follow."""
        sub_group, offset = self._position(param)
        grad = self._homes[sub_group].grad
        if self._staging is None:
            grad.narrow(0, offset, total.numel()).copy_(total)
        else:
            self._staging.send(grad, offset, total)

    def _flush(self) -> None:
        if self._staging is not None:
            self._staging.flush()

    @staticmethod
    def _in_host_memory(tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is in host memory that the accelerator does not share."""
        return not get_accelerator().on_accelerator(tensor)

    def _params(self) -> Iterator[Parameter]:
        return (param for group in self._optimizer.fp16_groups for param in group)

    def _position(self, param: Parameter) -> tuple[int, int]:
        """Return the parameter's sub-group and its first element there."""
        sub_group, offset, _ = self._optimizer.grad_position[self._optimizer.get_param_id(param)]
        return sub_group, offset

    def _copied(self, param: Parameter) -> torch.Tensor:
        sub_group, view = self._place(param)
        copied: torch.Tensor = view(self.home_of(sub_group)).to(torch.float32, copy=True)
        return copied

    def _place(self, param: Parameter) -> tuple[int, Any]:
        """The sub-group, and what narrows a tensor of its length to the parameter."""
        sub_group, offset, numel = self._optimizer.grad_position[self._optimizer.get_param_id(param)]
        return sub_group, lambda whole: whole.narrow(0, offset, numel)
