"""Update and publish the early ranges as soon as the step is decided, before the schedule begins.

The early ranges are small: they hold the persistent parameters, which DeepSpeed keeps gathered. Resident ranges are
updated in place on the accelerator. All others are updated in host memory, in one call. For that the gradient of a
streamed range is copied to host memory. The range's slot may have been prefetched before; it is not read, because the
schedule's actions skip the early ranges.

A unit whose memory on the accelerator is given back to training has one early range: all of it. Its gradient is in host
memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from deep_opt_states.device.interface import Device, Stream
from deep_opt_states.device.kernels.adam import AdamKernel, ElementRange, RangeUpdate
from deep_opt_states.runtime.state import Split, UnitState
from deep_opt_states.runtime.worker import CpuLane
from perf_model.schedule.action import Lane
from perf_model.schedule.placement import Placement


class EarlyUpdate:
    """The update of the early ranges of all units of this rank, on the executor's streams and its worker.

    ``splits`` has the early ranges of each of ``states``. The constructor reserves page-locked host memory for the
    gradients of the streamed ranges, in fp32, because users may set gradients in fp32.

    The events order the streams:

    - ``_copied_to_host``: d2h stream -> worker, which then reads the gradients of the streamed ranges.
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
    ) -> None:
        self._device = device
        self._streams = streams
        self._worker = worker
        self._ranges: dict[Placement, list[tuple[UnitState, ElementRange]]] = {placement: [] for placement in Placement}
        for state, split in zip(states, splits, strict=True):
            placement = Placement.CPU if state.is_evicted else state.placement
            self._ranges[placement].extend((state, element_range) for element_range in split.early)
        numel = sum(element_range.numel for _, element_range in self._ranges[Placement.STREAMED])
        self._grads = device.empty_host(numel, torch.float32) if numel else None
        self._copied_to_host, self._updated, self._published = (device.event() for _ in range(3))

    def update(self, host_adam: AdamKernel, device_adam: AdamKernel | None) -> None:
        """Update and publish all early ranges.

        The host waits for the updates in host memory. The current stream waits for all parameters.
        """
        if not any(self._ranges.values()):
            return
        with self._streams[Lane.COMPUTE].issue():
            for state, element_range in self._ranges[Placement.RESIDENT]:
                assert device_adam is not None
                assert state.resident is not None
                tensors = state.accelerator_tensors(state.resident.states)
                device_adam.update_ranges([state.update_of(element_range, tensors)])
                if state.staged is not None:
                    # The copy precedes the next update on this stream, which stages its parameters in the same memory.
                    self._device.copy(state.view(state.param, element_range), state.view(state.staged, element_range))
        self._streams[Lane.COMPUTE].record(self._updated)
        ranges = [*self._ranges[Placement.CPU], *self._ranges[Placement.STREAMED]]
        updates = [*self._on_cpu(), *self._copy_gradients_to_host()]

        def update() -> None:
            self._copied_to_host.synchronize()
            host_adam.update_ranges(updates)

        self._worker.submit(update).result()
        with self._streams[Lane.PUBLISH].issue():
            for state, element_range in ranges:
                if not state.cpu_writes_param:
                    self._device.copy(state.view(state.param, element_range), state.view(state.rounded, element_range))
        self._streams[Lane.PUBLISH].record(self._published)
        self.wait()

    def wait(self) -> None:
        """Make the current stream wait until the parameters of all early ranges are updated and published.

        Operations issued on it afterwards may gather these parameters, or read them in place.
        """
        for event in (self._updated, self._published):
            self._device.current_stream().wait(event)

    def _on_cpu(self) -> list[RangeUpdate]:
        return [
            state.update_of(element_range, state.cpu_tensors) for state, element_range in self._ranges[Placement.CPU]
        ]

    def _copy_gradients_to_host(self) -> list[RangeUpdate]:
        """Issue the copies of streamed ranges' gradients to host memory, and return the updates that read them."""
        updates: list[RangeUpdate] = []
        begin = 0
        with self._streams[Lane.D2H].issue():
            for state, element_range in self._ranges[Placement.STREAMED]:
                assert self._grads is not None
                # The buffer has 4 bytes per element whichever dtype the gradient has: users may set it in fp32.
                grad = (
                    self._grads.narrow(0, begin, element_range.numel)
                    .view(state.grad.dtype)
                    .narrow(0, 0, element_range.numel)
                )
                self._device.copy(grad, state.view(state.grad, element_range))
                update = state.update_of(element_range, state.cpu_tensors)
                updates.append(replace(update, tensors=replace(update.tensors, grad=grad)))
                begin += element_range.numel
        self._streams[Lane.D2H].record(self._copied_to_host)
        return updates
