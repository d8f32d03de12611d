"""Update and publish the early ranges as soon as the step is decided, before the schedule begins.

The early ranges are small: they hold the persistent parameters, which DeepSpeed keeps gathered. Resident ranges are
updated in place on the accelerator, in one call. All others are updated in host memory, in one call, too. For that the
gradients of streamed ranges are copied to host memory. The range's slot may have been prefetched before; it is not
read, because the schedule's actions skip the early ranges.

A model has hundreds of such ranges, and each copy costs the host and the link some microseconds. So kernels gather the
gradients in one buffer and distribute the updated parameters from it, and one copy in each direction connects it with
host memory. Both are issued on the publish stream. It is idle then, so they wait neither for flushes of the last update
nor for prefetches in flight, which the h2d and d2h streams may still have to execute.

A unit whose memory on the accelerator is given back to training has one early range: all of it. Its gradient is in host
memory. It is large, so its parameters are copied directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any

import torch

from deep_opt_states.device.interface import Device, Stream
from deep_opt_states.device.kernels.adam import AdamKernel, ElementRange, RangeUpdate
from deep_opt_states.runtime.state import Split, UnitState
from deep_opt_states.runtime.worker import CpuLane
from perf_model.schedule.action import Lane
from perf_model.schedule.placement import Placement


@dataclass(frozen=True)
class EarlyBuffers:
    """Memory that the small early ranges pass through, of shape [numel] each, with 4 bytes for each of their elements.

    ``on_accelerator`` has the gradients first and the updated parameters afterwards. ``grads`` and ``rounded`` are
    their page-locked host memory.
    """

    on_accelerator: torch.Tensor
    grads: torch.Tensor
    rounded: torch.Tensor

    @classmethod
    def reserve(cls, device: Device[Any], numel: int, before: EarlyBuffers | None) -> EarlyBuffers | None:
        """Return ``before`` if it has at least ``numel`` elements, or else new buffers; None if none are needed.

        Nothing is allocated while a unit gives its memory back, because fewer ranges pass through the buffers then.
        """
        if numel == 0:
            return None
        if before is not None and before.grads.numel() >= numel:
            return before
        return cls(
            device.empty(numel, torch.float32),
            device.empty_host(numel, torch.float32),
            device.empty_host(numel, torch.float32),
        )


@dataclass(kw_only=True)
class _Operations:
    """The operations of one update of the early ranges. Each pair has the destination and the source of a copy."""

    on_accelerator: list[RangeUpdate] = field(default_factory=list)
    """Updates that write the parameters in place."""
    staged: list[tuple[RangeUpdate, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Updates of parameters in host memory, each with the copy that follows before the same memory is staged again."""
    gathers: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    to_host: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    on_host: list[RangeUpdate] = field(default_factory=list)
    to_accelerator: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    distributions: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


class EarlyUpdate:
    """The update of the early ranges of all units of this rank, on the executor's streams and its worker.

    ``splits`` has the early ranges of each of ``states``. The constructor reserves ``buffers``, unless those of the
    update ``before`` are large enough. Users may set gradients in fp32, so each element has 4 bytes.

    The events order the streams:

    - ``_copied_to_host``: publish stream -> worker, which then reads the gradients of the streamed ranges.
    - ``_updated``: compute stream -> current stream, which then reads the parameters of resident ranges.
    - ``_published``: publish stream -> current stream, which then reads all other parameters.
    """

    def __init__(
        self,
        states: Sequence[UnitState],
        splits: Sequence[Split],
        device: Device[Any],
        streams: Mapping[Lane, Stream[Any]],
        worker: CpuLane,
        before: EarlyBuffers | None = None,
    ) -> None:
        self._device = device
        self._streams = streams
        self._worker = worker
        self._states = [state for state, split in zip(states, splits, strict=True) if split.early]
        self._ranges: dict[Placement, list[tuple[UnitState, ElementRange]]] = {placement: [] for placement in Placement}
        self._evicted: list[tuple[UnitState, ElementRange]] = []
        for state, split in zip(states, splits, strict=True):
            ranges = self._evicted if state.is_evicted else self._ranges[state.placement]
            ranges.extend((state, element_range) for element_range in split.early)
        in_buffers = [
            *self._ranges[Placement.STREAMED],
            *(pair for pair in self._ranges[Placement.CPU] if not pair[0].cpu_writes_param),
        ]
        numel = sum(element_range.numel for _, element_range in in_buffers)
        self.buffers = EarlyBuffers.reserve(device, numel, before)
        self._known: list[torch.Tensor] = []
        """The gradients and parameters that ``_operations`` were derived from."""
        self._operations = _Operations()
        self._copied_to_host, self._updated, self._published = (device.event() for _ in range(3))

    def close(self) -> None:
        """Free the buffers, and drop the references to the states."""
        self._states.clear()
        self._ranges.clear()
        self._evicted.clear()
        self._known.clear()
        self._operations, self.buffers = _Operations(), None

    def update(self, host_adam: AdamKernel, device_adam: AdamKernel | None) -> None:
        """Update and publish all early ranges.

        The host waits for the updates in host memory. The current stream waits for all parameters.
        """
        if not self._states:
            return
        operations = self._current_operations()
        with self._streams[Lane.COMPUTE].issue():
            if operations.on_accelerator:
                assert device_adam is not None
                device_adam.update_ranges(operations.on_accelerator)
            for update, param, staged in operations.staged:
                assert device_adam is not None
                device_adam.update_ranges([update])
                # The copy precedes the next update on this stream, which stages its parameters in the same memory.
                self._device.copy(param, staged)
        self._streams[Lane.COMPUTE].record(self._updated)
        self._copy_gradients_to_host(operations)

        def update_on_host() -> None:
            self._copied_to_host.synchronize()
            host_adam.update_ranges(operations.on_host)

        self._worker.submit(update_on_host).result()
        self._publish(operations)
        self.wait()

    def forget_replaced_tensors(self) -> None:
        """Drop the references to gradients and parameters that units have no more. No update is running."""
        if not self._are_known(self._present_tensors()):
            self._known, self._operations = [], _Operations()

    def wait(self) -> None:
        """Make the current stream wait until the parameters of all early ranges are updated and published.

        Operations issued on it afterwards may gather these parameters, or read them in place.
        """
        # Each module's forward calls this, and CUDA needs some microseconds to look the current stream up.
        stream = self._device.current_stream()
        for event in (self._updated, self._published):
            stream.wait(event)

    def _copy_gradients_to_host(self, operations: _Operations) -> None:
        with self._streams[Lane.PUBLISH].issue():
            if operations.gathers:
                self._device.copy_each(operations.gathers)
            for host, gathered in operations.to_host:
                self._device.copy(host, gathered)
        self._streams[Lane.PUBLISH].record(self._copied_to_host)

    def _publish(self, operations: _Operations) -> None:
        with self._streams[Lane.PUBLISH].issue():
            for destination, source in operations.to_accelerator:
                self._device.copy(destination, source)
            if operations.distributions:
                self._device.copy_each(operations.distributions)
        self._streams[Lane.PUBLISH].record(self._published)

    def _current_operations(self) -> _Operations:
        """Return the operations on the present tensors. Views of hundreds of ranges are made only if these change."""
        tensors = self._present_tensors()
        if not self._are_known(tensors):
            self._known, self._operations = tensors, self._derive()
        return self._operations

    def _present_tensors(self) -> list[torch.Tensor]:
        return [tensor for state in self._states for tensor in (state.grad, state.param)]

    def _are_known(self, tensors: Sequence[torch.Tensor]) -> bool:
        return len(tensors) == len(self._known) and all(map(is_, tensors, self._known))

    def _derive(self) -> _Operations:
        operations = _Operations()
        for state, element_range in self._ranges[Placement.RESIDENT]:
            assert state.resident is not None
            update = state.update_of(element_range, state.accelerator_tensors(state.resident.states))
            if state.staged is None:
                operations.on_accelerator.append(update)
            else:
                param, staged = (state.view(tensor, element_range) for tensor in (state.param, state.staged))
                operations.staged.append((update, param, staged))
        on_host = [
            *self._streamed(operations),
            *((state, state.cpu_update_of(elements)) for state, elements in self._ranges[Placement.CPU]),
        ]
        self._round_into_buffer(on_host, operations)
        for state, element_range in self._evicted:
            operations.on_host.append(state.cpu_update_of(element_range))
            if not state.cpu_writes_param:
                param = state.view(state.param, element_range)
                operations.to_accelerator.append((param, state.view(state.rounded, element_range)))
        return operations

    def _streamed(self, operations: _Operations) -> list[tuple[UnitState, RangeUpdate]]:
        """Return the updates of the streamed ranges, which read their gradients in host memory."""
        # Larger elements first: in this order, all of them are aligned without gaps.
        streamed = sorted(self._ranges[Placement.STREAMED], key=lambda pair: -pair[0].grad.itemsize)
        if not streamed:
            return []
        assert self.buffers is not None
        layout = [(element_range.numel, state.grad.dtype) for state, element_range in streamed]
        gathered, hosts = _consecutive(self.buffers.on_accelerator, layout), _consecutive(self.buffers.grads, layout)
        updates = []
        for (state, element_range), on_accelerator, grad in zip(streamed, gathered, hosts, strict=True):
            operations.gathers.append((on_accelerator, state.view(state.grad, element_range)))
            update = state.cpu_update_of(element_range)
            updates.append((state, replace(update, tensors=replace(update.tensors, grad=grad))))
        operations.to_host.append(_first_bytes(layout, self.buffers.grads, self.buffers.on_accelerator))
        return updates

    def _round_into_buffer(self, updates: Sequence[tuple[UnitState, RangeUpdate]], operations: _Operations) -> None:
        """Add the ``updates``, which write the parameters to the buffer unless the CPU can write the model's own."""
        operations.on_host.extend(update for state, update in updates if state.cpu_writes_param)
        published = [(state, update) for state, update in updates if not state.cpu_writes_param]
        if not published:
            return
        assert self.buffers is not None
        layout = [(update.element_range.numel, state.param.dtype) for state, update in published]
        hosts = _consecutive(self.buffers.rounded, layout)
        on_accelerator = _consecutive(self.buffers.on_accelerator, layout)
        for (state, update), rounded, source in zip(published, hosts, on_accelerator, strict=True):
            operations.on_host.append(replace(update, tensors=replace(update.tensors, param=rounded)))
            operations.distributions.append((state.view(state.param, update.element_range), source))
        operations.to_accelerator.append(_first_bytes(layout, self.buffers.on_accelerator, self.buffers.rounded))


def _consecutive(memory: torch.Tensor, layout: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    """Return views of ``memory`` one behind the other, each with its number of elements and dtype in ``layout``."""
    views, begin = [], 0
    for numel, dtype in layout:
        views.append(memory.view(torch.uint8).narrow(0, begin, numel * dtype.itemsize).view(dtype))
        begin += numel * dtype.itemsize
    return views


def _first_bytes(
    layout: Sequence[tuple[int, torch.dtype]], destination: torch.Tensor, source: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of both tensors that the views of ``layout`` take."""
    size_bytes = sum(numel * dtype.itemsize for numel, dtype in layout)

    def first(memory: torch.Tensor) -> torch.Tensor:
        return memory.view(torch.uint8).narrow(0, 0, size_bytes)

    return first(destination), first(source)
