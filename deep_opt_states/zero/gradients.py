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

from deep_opt_states.device.interface import Device
from deep_opt_states.zero.compat import Parameter, reduced_this_window, sees_gradients

MAX_COPY_BYTES = 64 * 2**20
"""Gradients that lie next to each other go down in one copy, up to so many bytes, which take memory on the accelerator
until they are there. At that size a link is as fast as it can be."""


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


@dataclass
class Traffic:
    """Bytes of gradients that were copied between host memory and the accelerator, by direction, and in how many
    copies."""

    d2h_bytes: int = 0
    d2h_copies: int = 0
    h2d_bytes: int = 0
    h2d_copies: int = 0


@dataclass(frozen=True)
class _Down:
    """What waits to be copied to ``homes[sub_group].grad``, from ``offset`` on."""

    sub_group: int
    offset: int
    values: torch.Tensor

    @property
    def end(self) -> int:
        return self.offset + self.values.numel()


class Gradients:
    """``homes`` of the sub-groups in DeepSpeed's order, zero at first.

    What goes down to host memory does so on a stream of its own, so that it holds up no reduction.
    """

    def __init__(self, optimizer: Any, homes: Sequence[Home], device: Device[Any]) -> None:
        self._optimizer = optimizer
        self._homes = homes
        self._device = device
        self._d2h = device.stream()
        self._staged, self._gone_down = device.event(), device.event()
        self.traffic = Traffic()
        self._in_fp32: dict[int, torch.Tensor] = {}
        """What users have set, or may set, by parameter; it counts instead of the home."""
        self._written: dict[int, Parameter] = {}
        """Written since the last step, by backward or by the user."""
        self._stale: dict[int, Parameter] = {}
        """Written for an earlier step, and not since."""
        self._summed: set[int] = set()
        """The parameters with a gradient in this window, by ``ds_id``: what arrives for them next is added."""
        self._unscaled: dict[int, float] = {}
        """Our kernels only read gradients: these still lack the factor that stock multiplies in before Adam."""

    # Backward

    @torch.no_grad()
    def reduced(self, params: Sequence[Parameter], partitions: Sequence[torch.Tensor]) -> None:
        """One bucket of reduced gradients, shape [partition_numel] or less each, on the reduction's stream."""
        optimizer = self._optimizer
        boundary = optimizer.is_gradient_accumulation_boundary()
        down: list[_Down] = []
        for param, partition in zip(params, partitions, strict=True):
            if sees_gradients(optimizer, param):
                first = param.ds_id not in self._summed
                self._summed.add(param.ds_id)
                # What stock's boundary of windows that users delimit goes by.
                optimizer._offload_boundary_param_ids.add(param.ds_id)
                total = self._add(param, partition, first, boundary, down)
                if boundary:
                    self._complete(param, total)
            # The partition may be the gradient itself: what reads it is issued by now.
            if param.grad is not None and not get_accelerator().is_synchronized_device():
                param.grad.record_stream(get_accelerator().current_stream())
            param.grad = None
        self._send(down)

    def arrive(self) -> None:
        """What is issued on the current stream from now on finds the gradients in host memory, and a host that waits
        for it does."""
        self._d2h.record(self._gone_down)
        self._device.current_stream().wait(self._gone_down)

    def wait(self) -> None:
        """The host finds them there."""
        self._d2h.record(self._gone_down)
        self._gone_down.synchronize()

    def abandon_window(self) -> None:
        """Let the next gradient of each parameter replace the sum so far: the caller takes no step with it."""
        self._summed.clear()

    def finish_window(self) -> None:
        """Of a window that the user has delimited: what was reduced in it, none of it at a boundary."""
        for param in self._params():
            if reduced_this_window(self._optimizer, param):
                self._finish(param)

    def complete_window(self) -> None:
        """Before the norm: fill in the parameters that the last backward of the window did not reach."""
        for param in self._params():
            if param.ds_id not in self._written and reduced_this_window(self._optimizer, param):
                self._finish(param)
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
        """Let go of all memory."""
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
        """The same, to be written to: it stands for the gradient until backward writes that anew."""
        if param.ds_id not in self._in_fp32:
            self._in_fp32[param.ds_id] = self._copied(param)
        grad_scale = self._unscaled.pop(param.ds_id, None)
        if grad_scale is not None:
            self._in_fp32[param.ds_id].mul_(grad_scale)
        return self._in_fp32[param.ds_id]

    def set_by_user(self, params: Iterable[Parameter]) -> None:
        """A frozen one has no gradient to be set: as with stock, nothing has happened to it."""
        for param in params:
            if param.requires_grad:
                self._written[param.ds_id] = param

    def _add(
        self, param: Parameter, partition: torch.Tensor, first: bool, boundary: bool, down: list[_Down]
    ) -> torch.Tensor:
        """The sum so far, on the accelerator."""
        sub_group, view = self._place(param)
        home = self._homes[sub_group]
        sums = view(home.sums).narrow(0, 0, partition.numel())
        on_accelerator = get_accelerator().on_accelerator
        if on_accelerator(sums):
            if first:
                sums.copy_(partition)
            else:
                sums.add_(partition.to(sums.dtype).view(sums.shape))
            total = sums
        elif first:
            total = partition.to(sums.dtype)
        else:
            # Adding on the host would be slow.
            total = self._up(sums).add_(partition.to(sums.dtype).view(sums.shape))
        if boundary if home.accumulator is not None else not on_accelerator(home.grad):
            down.append(_Down(sub_group, self._offset(param), total.view(-1)))
        return total

    def _finish(self, param: Parameter) -> None:
        """The sum is complete, and was not known to be when it was last added to."""
        sub_group, view = self._place(param)
        home = self._homes[sub_group]
        total = view(home.sums)
        if not get_accelerator().on_accelerator(total):
            total = self._up(total)
        elif home.accumulator is not None:
            self._send([_Down(sub_group, self._offset(param), total)])
        self._complete(param, total)

    def _complete(self, param: Parameter, total: torch.Tensor) -> None:
        optimizer = self._optimizer
        optimizer.norm_for_param_grads[optimizer.get_param_id(param)] = optimizer._constant_buffered_norm2(total)
        self._written[param.ds_id] = param
        self._forget_fp32(param)

    def _forget_fp32(self, param: Parameter) -> None:
        self._in_fp32.pop(param.ds_id, None)
        self._unscaled.pop(param.ds_id, None)

    def _up(self, host: torch.Tensor) -> torch.Tensor:
        self.arrive()
        self.traffic.h2d_bytes += host.nbytes
        self.traffic.h2d_copies += 1
        return host.to(get_accelerator().current_device_name(), non_blocking=True)

    def _send(self, down: list[_Down]) -> None:
        for run in _runs(down):
            # Copied also where it is one: it may lie in a bucket that is reduced into next.
            staged = torch.cat([part.values for part in run])
            self._device.current_stream().record(self._staged)
            self._d2h.wait(self._staged)
            home = self._homes[run[0].sub_group].grad.narrow(0, run[0].offset, staged.numel())
            with self._d2h.issue():
                home.copy_(staged, non_blocking=True)
                if not get_accelerator().is_synchronized_device():
                    # Or its memory would be staged into again before it has been read.
                    staged.record_stream(get_accelerator().current_stream())
            self.traffic.d2h_bytes += home.nbytes
            self.traffic.d2h_copies += 1

    def _params(self) -> Iterator[Parameter]:
        return (param for group in self._optimizer.fp16_groups for param in group)

    def _offset(self, param: Parameter) -> int:
        return self._optimizer.grad_position[self._optimizer.get_param_id(param)][1]

    def _copied(self, param: Parameter) -> torch.Tensor:
        sub_group, view = self._place(param)
        copied: torch.Tensor = view(self.home_of(sub_group)).to(torch.float32, copy=True)
        return copied

    def _place(self, param: Parameter) -> tuple[int, Any]:
        """The sub-group, and what narrows a tensor of its length to the parameter."""
        sub_group, offset, numel = self._optimizer.grad_position[self._optimizer.get_param_id(param)]
        return sub_group, lambda whole: whole.narrow(0, offset, numel)


def _runs(down: Iterable[_Down]) -> Iterator[list[_Down]]:
    """What lies next to each other, in order, up to ``MAX_COPY_BYTES``."""
    run: list[_Down] = []
    run_bytes = 0
    for part in sorted(down, key=lambda part: (part.sub_group, part.offset)):
        adjacent = run and (run[-1].sub_group, run[-1].end) == (part.sub_group, part.offset)
        if run and not (adjacent and run_bytes + part.values.nbytes <= MAX_COPY_BYTES):
            yield run
            run, run_bytes = [], 0
        run.append(part)
        run_bytes += part.values.nbytes
    if run:
        yield run
