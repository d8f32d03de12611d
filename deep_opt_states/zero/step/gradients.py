"""Keep each gradient where it is updated, and copy it between host and accelerator at most once.

The gradient of a parameter is the sum of all gradients that were reduced for it since the last step, and zero if there
were none, also where stock departs from that (*Departures from stock* in ``docs/compatibility.md``).

A partition may belong to several units, so its norm is computed on the accelerator before its parts are copied to their
buffers. A gradient stays in the accumulation dtype, unless the user sets it: then it is in the dtype of the master
weights, as in stock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from deep_opt_states.device.interface import Event
from deep_opt_states.zero.internals.compat import (
    Parameter,
    has_gradient_here,
    is_boundary,
    l2_norm,
    masters_dtype,
    place_of_gradient,
)
from deep_opt_states.zero.step.gradient_buffers import GradientBuffer, Segment, Segments
from deep_opt_states.zero.step.staging import Staging
from perf_model.schedule.workload import ALIGNMENT


class Gradients:
    """The gradients of one rank, from their reduction to the update.

    ``buffers`` holds one buffer per range of a unit, in the order of the units, initially zero. ``staging`` copies
    gradients to host memory, if any are copied there.
    """

    def __init__(self, optimizer: Any, buffers: Sequence[GradientBuffer], staging: Staging | None) -> None:
        self._optimizer = optimizer
        self._dtype = masters_dtype(optimizer)
        self._staging = staging
        self.set_buffers(buffers)
        self._waited_for_copies = False
        """Whether the current stream waits for the copies of all sums to which the current bucket may be added."""
        self._by_user: dict[int, torch.Tensor] = {}
        """The gradients that the user has set or may set, by ``ds_id``. They override the gradient buffer."""
        self._written: dict[int, Parameter] = {}
        """The parameters whose gradient backward or the user has written since the last step, by ``ds_id``."""
        self._stale: dict[int, Parameter] = {}
        """The parameters whose gradient was written for an earlier step and not since, by ``ds_id``."""
        self._is_complete = False
        """Whether ``_written`` has the gradients of a complete window, for which no update has begun."""
        self._summed: dict[int, Parameter] = {}
        """The parameters with a sum in this accumulation window, to which the next gradient is added, by ``ds_id``."""
        self._writes: Counter[int] = Counter()
        """The number of writes to each buffer, by its index: counted before the memory changes."""
        self._unscaled: dict[int, float] = {}
        """The factor that stock would have multiplied into the gradient, by ``ds_id``: our kernels only read them."""

    def set_buffers(self, buffers: Sequence[GradientBuffer]) -> None:
        """Use ``buffers`` from now on, which contain the gradients of the last step and the sums of an open window."""
        self._buffers = buffers
        self._segments = Segments(self._optimizer, buffers)

    @property
    def have_device_accumulators(self) -> bool:
        """Return whether gradients of units that the CPU updates are accumulated on the accelerator."""
        return any(buffer.device_accumulator is not None for buffer in self._buffers)

    def free_device_accumulators(self) -> None:
        """Free the accumulators of units that the CPU updates. They hold no sums of an open window."""
        self.set_buffers([replace(buffer, device_accumulator=None) for buffer in self._buffers])

    def copy_open_sums_to_host(self) -> None:
        """Copy open sums from accumulators of CPU units to host memory and wait. No gradient is being reduced."""
        self.synchronize()
        for on_host, on_accelerator in self._open_sums():
            on_host.copy_(on_accelerator)

    def copy_open_sums_from_host(self) -> None:
        """Copy open sums from host memory to new accumulators of CPU units. No gradient is being reduced."""
        for on_host, on_accelerator in self._open_sums():
            on_accelerator.copy_(on_host)

    def _open_sums(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for segment in chain.from_iterable(map(self._segments.of_param, self._summed.values())):
            if segment.buffer.device_accumulator is not None:
                yield segment.view(segment.buffer.grad), segment.view(segment.buffer.accumulator)

    # Backward

    @torch.no_grad()
    def add_reduced_bucket(self, params: Sequence[Parameter], partitions: Sequence[torch.Tensor]) -> None:
        """Add one bucket of reduced gradients, on the stream that reduced them, which is current.

        ``partitions`` are this rank's parts of the gradients of ``params``, each of shape [partition_numel] or shorter.
        """
        optimizer = self._optimizer
        boundary = is_boundary(optimizer)
        self.end_window()
        self._waited_for_copies = False
        # In the order of host memory, so that neighbouring gradients are copied together.
        pairs = zip(params, partitions, strict=True)
        for param, partition in sorted(pairs, key=lambda pair: place_of_gradient(optimizer, pair[0])):
            if has_gradient_here(optimizer, param):
                first = param.ds_id not in self._summed
                self._summed[param.ds_id] = param
                total = self._add(param, partition, first, boundary)
                if boundary:
                    self._complete(param, total)
            # The partition may be the gradient itself, whose readers are issued but maybe not executed: record the
            # stream, so that the allocator does not reuse the memory too early.
            if param.grad is not None and not get_accelerator().is_synchronized_device():
                param.grad.record_stream(get_accelerator().current_stream())
            param.grad = None
        self._flush()

    def wait_for_copies(self) -> None:
        """Make the current stream, and a host that waits for it, wait for all gradient copies to host memory."""
        if self._staging is not None:
            self._staging.wait_for_copies()

    def synchronize(self) -> None:
        """Block the host until all gradient copies to host memory have finished."""
        if self._staging is not None:
            self._staging.synchronize()

    def abandon_window(self) -> None:
        """Discard the sums of an incomplete window. A complete window remains valid until backward, as in stock."""
        self._stale |= {ds_id: param for ds_id, param in self._summed.items() if ds_id not in self._written}
        self._summed.clear()

    def is_written(self, param: Parameter) -> bool:
        """Return whether the gradient of this window is complete."""
        return param.ds_id in self._written

    @property
    def params_here(self) -> list[Parameter]:
        """Return the parameters of whose gradients this rank has a part."""
        return [param for param in self._params() if has_gradient_here(self._optimizer, param)]

    def parts_of(self, param: Parameter) -> list[int]:
        """Return the indices of the buffers that hold a part of the parameter's gradient."""
        return [segment.index for segment in self._segments.of_param(param)]

    def writes_to(self, parts: Sequence[int]) -> list[int]:
        return [self._writes[part] for part in parts]

    def record_copies(self, event: Event) -> bool:
        """Record ``event`` behind the copies to host memory, and return whether there are any to wait for."""
        if self._staging is not None:
            self._staging.record_copies(event)
        return self._staging is not None

    def finish_window(self, complete: Container[int] = ()) -> None:
        """Complete all sums except ``complete``. ``step()`` calls this if no backward is known to be the last."""
        for param in self._params():
            if param.ds_id in self._summed and param.ds_id not in complete:
                self._finish(param)
        self._flush()

    def complete_window(self) -> None:
        """Complete the parameters that the last backward of the window did not reach. Call this before the norm."""
        # Gradients of an earlier step that were not written since become zero. An interrupted step may call this again.
        self.finish_window(complete=self._written)
        for ds_id, param in self._stale.items():
            if ds_id not in self._written:
                self._forget_copy(param)
                for segment in self._segments.of_param(param):
                    self._writes[segment.index] += 1
                    segment.view(segment.buffer.grad).zero_()
        self._is_complete = True
        self._summed.clear()

    # Step

    def end_window(self) -> None:
        """Let the gradients of the complete window, if there is one, belong to an earlier step: its update starts."""
        if self._is_complete:
            self._stale, self._written = self._written, {}
            self._is_complete = False

    def record_pending_scale(self, sub_group: int, grad_scale: float) -> None:
        """Record that the sub-group was updated with ``grad_scale``, which was not multiplied into its gradients."""
        if grad_scale != 1.0:
            self._unscaled.update((param.ds_id, grad_scale) for param in self._optimizer.fp16_groups[sub_group])

    def buffer_of(self, index: int) -> torch.Tensor:
        """Return the gradients of one range in the accumulation dtype, shape [numel]."""
        return self._buffers[index].grad

    def grads_for_update(self) -> list[torch.Tensor]:
        """Return the gradients of each range, shape [numel], as copies where the user has set some."""
        grads = [buffer.grad for buffer in self._buffers]
        for param in self._params() if self._by_user else ():
            if param.ds_id in self._by_user:
                for segment in self._segments.of_param(param):
                    if grads[segment.index] is segment.buffer.grad:
                        grads[segment.index] = self._copy_of(segment.buffer)
                    segment.view(grads[segment.index]).copy_(segment.part(self._by_user[param.ds_id]))
        return grads

    def close(self) -> None:
        """Release all memory after all copies to it have finished."""
        if self._staging is not None:
            self._staging.close()
        self.set_buffers(())
        self._by_user.clear()

    # Readers and writers other than backward and the update

    def read(self, param: Parameter) -> torch.Tensor:
        """Return the gradient as stock's buffer would hold it, shape [partition_numel], to read only."""
        if param.ds_id in self._by_user:
            return self.writable(param)
        partition = self._copied(param)
        grad_scale = self._unscaled.get(param.ds_id)
        return partition if grad_scale is None else partition.mul_(grad_scale)

    def writable(self, param: Parameter) -> torch.Tensor:
        """Return the gradient in host memory, shape [partition_numel], in the dtype of the masters, until backward."""
        if param.ds_id not in self._by_user:
            self._by_user[param.ds_id] = self._copied(param).cpu()
        grad_scale = self._unscaled.pop(param.ds_id, None)
        if grad_scale is not None:
            self._by_user[param.ds_id].mul_(grad_scale)
        return self._by_user[param.ds_id]

    def mark_set_by_user(self, params: Iterable[Parameter]) -> None:
        """Record that the user has set the gradients of ``params``. As in stock, frozen ones are ignored."""
        self._written |= {param.ds_id: param for param in params if param.requires_grad}

    def _add(self, param: Parameter, partition: torch.Tensor, first: bool, boundary: bool) -> torch.Tensor:
        """Return the sum so far, on the accelerator, and copy it to host memory if it belongs there now."""
        segments = self._segments.of_param(param, partition.numel())
        self._writes.update(segment.index for segment in segments)
        # DeepSpeed has converted the partition to the accumulation dtype, so that this copies nothing.
        total = partition.view(-1).to(segments[0].buffer.grad.dtype)
        accumulators = [segment.view(segment.buffer.accumulator) for segment in segments]
        if len(segments) == 1 and not self._in_host_memory(accumulators[0]):
            (accumulator,) = accumulators
            total = accumulator.copy_(total) if first else accumulator.add_(total)
        else:
            for segment, accumulator in zip(segments, accumulators, strict=True):
                self._add_segment(segment.part(total), accumulator, first)
        for segment in segments:
            is_summed_elsewhere = segment.buffer.device_accumulator is not None
            belongs_on_host = boundary if is_summed_elsewhere else self._in_host_memory(segment.buffer.grad)
            if belongs_on_host:
                self._send(segment, total)
        return total

    def _add_segment(self, total: torch.Tensor, accumulator: torch.Tensor, first: bool) -> None:
        """Add ``accumulator`` to ``total`` unless this is the first gradient, and keep the sum if it stays there."""
        if not self._in_host_memory(accumulator):
            if not first:
                total.add_(accumulator)
            accumulator.copy_(total)
        elif not first:
            # On the accelerator: the host would be slow.
            assert self._staging is not None
            if not self._waited_for_copies:
                self._staging.wait_for_copies()
                self._waited_for_copies = True
            self._staging.add_to(total, accumulator)

    def _finish(self, param: Parameter) -> None:
        """Complete the sum of a parameter, which was not known to be the last when the last gradient was added."""
        segments = self._segments.of_param(param)
        parts = []
        for segment in segments:
            self._writes[segment.index] += 1
            part = segment.view(segment.buffer.accumulator)
            if self._in_host_memory(part):
                self.wait_for_copies()
                # Copy it back for its norm: after backward, and one parameter at a time.
                part = part.to(get_accelerator().current_device_name(), non_blocking=True)
            parts.append(part)
        total = parts[0] if len(parts) == 1 else torch.cat(parts)
        for segment in segments:
            if segment.buffer.device_accumulator is not None:
                self._send(segment, total)
        self._complete(param, total)

    def _complete(self, param: Parameter, total: torch.Tensor) -> None:
        """Record the norm of the complete gradient ``total``, which replaces one that the user has set."""
        optimizer = self._optimizer
        optimizer.norm_for_param_grads[optimizer.get_param_id(param)] = l2_norm(optimizer, total)
        self._written[param.ds_id] = param
        self._forget_copy(param)

    def _forget_copy(self, param: Parameter) -> None:
        self._by_user.pop(param.ds_id, None)
        self._unscaled.pop(param.ds_id, None)

    def _send(self, segment: Segment, total: torch.Tensor) -> None:
        """Copy the segment of ``total`` to its gradient buffer, which is in host memory. ``_flush`` must follow."""
        values = segment.part(total)
        if self._staging is None:
            segment.view(segment.buffer.grad).copy_(values)
        else:
            self._staging.send(segment.buffer.grad, segment.offset, values)

    def _flush(self) -> None:
        if self._staging is not None:
            self._staging.flush()

    @staticmethod
    def _in_host_memory(tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is in host memory that the accelerator does not share."""
        return not get_accelerator().on_accelerator(tensor)

    def _params(self) -> Iterator[Parameter]:
        return (param for group in self._optimizer.fp16_groups for param in group)

    def _copied(self, param: Parameter) -> torch.Tensor:
        """Return a copy of the parameter's part of the gradient buffers, shape [partition_numel]."""
        parts = [segment.view(segment.buffer.grad) for segment in self._segments.of_param(param)]
        if len({part.device for part in parts}) > 1:
            parts = [part.cpu() for part in parts]
        return torch.cat(parts).to(self._dtype)

    def _copy_of(self, buffer: GradientBuffer) -> torch.Tensor:
        """Return a copy of the gradients of one range, which starts in memory as far after a wide load."""
        skip = buffer.elements.begin % ALIGNMENT
        memory = torch.empty(skip + buffer.elements.numel, dtype=self._dtype, device=buffer.grad.device)
        return memory[skip:].copy_(buffer.grad)
