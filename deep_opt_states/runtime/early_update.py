"""Update and publish the early ranges as soon as the step is decided, before the schedule begins.

The early ranges are small: they hold the persistent parameters, which DeepSpeed keeps gathered. Resident ranges are
updated in place on the accelerator. All others are updated in host memory, in one call. For that the gradient of a
streamed range is copied to host memory. The range's slot may have been prefetched before; it is not read, because the
schedule's actions skip the early ranges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from deep_opt_states.device.interface import Device, Stream
from deep_opt_states.device.kernels.adam import AdamKernel, AdamTensors, ElementRange, RangeUpdate
from deep_opt_states.runtime.state import SubGroupState
from deep_opt_states.runtime.worker import CpuLane
from perf_model.schedule.action import Lane
from perf_model.schedule.placement import Placement


class EarlyUpdate:
    """The update of all early ranges of this rank, on the executor's streams and its worker.

    Each entry of ``ranges`` has the placement and the index of its sub-group. The constructor reserves page-locked host
    memory for the streamed ranges: space for an fp32 gradient per element, since users may set gradients in fp32, and
    space for a 16-bit parameter per element, unless the CPU can write the model's parameters in place.

    The events order the streams:

    - ``_copied_to_host``: d2h stream -> worker, which then reads the gradients of the streamed ranges.
    - ``_updated``: compute stream -> current stream, which then reads the parameters of resident ranges.
    - ``_published``: h2d stream -> current stream, which then reads all other parameters.
    """

    def __init__(
        self,
        ranges: Iterable[tuple[Placement, int, ElementRange]],
        states: Sequence[SubGroupState],
        device: Device[Any],
        streams: Mapping[Lane, Stream[Any]],
        worker: CpuLane,
    ) -> None:
        self._states = states
        self._device = device
        self._streams = streams
        self._worker = worker
        self._ranges: dict[Placement, list[tuple[int, ElementRange]]] = {placement: [] for placement in Placement}
        for placement, index, element_range in ranges:
            self._ranges[placement].append((index, element_range))
        self._grads = self._rounded = None
        if numel := sum(element_range.numel for _, element_range in self._ranges[Placement.STREAMED]):
            self._grads = device.empty_host(numel, torch.float32)
            streamed = (states[index] for index, _ in self._ranges[Placement.STREAMED])
            if states[0].param.dtype != torch.float32 and not any(state.cpu_writes_param for state in streamed):
                self._rounded = device.empty_host(numel, states[0].param.dtype)
        self._copied_to_host, self._updated, self._published = (device.event() for _ in range(3))

    def update(self, host_adam: AdamKernel, device_adam: AdamKernel | None) -> None:
        """Update and publish all early ranges.

        The host waits for the updates in host memory. The current stream waits for all parameters.
        """
        if not any(self._ranges.values()):
            return
        with self._streams[Lane.COMPUTE].issue():
            for index, element_range in self._ranges[Placement.RESIDENT]:
                assert device_adam is not None
                state = self._states[index]
                resident = RangeUpdate(
                    sub_group=index,
                    tensors=state.accelerator_tensors(state).narrow(element_range),
                    element_range=element_range,
                )
                device_adam.update_ranges([resident])
                if state.staged is not None:
                    # The copy precedes the next update on this stream, which stages its parameters in the same memory.
                    self._device.copy(element_range.view(state.param), element_range.view(state.staged))
        self._streams[Lane.COMPUTE].record(self._updated)
        in_host_memory = [*self._on_cpu(), *self._copy_gradients_to_host()]

        def update() -> None:
            self._copied_to_host.synchronize()
            host_adam.update_ranges(in_host_memory)

        self._worker.submit(update).result()
        with self._streams[Lane.H2D].issue():
            for updated in in_host_memory:
                state = self._states[updated.sub_group]
                if not state.cpu_writes_param:
                    source = updated.tensors.master if updated.tensors.param is None else updated.tensors.param
                    self._device.copy(updated.element_range.view(state.param), source)
        self._streams[Lane.H2D].record(self._published)
        self.wait()

    def wait(self) -> None:
        """Make the current stream wait until the parameters of all early ranges are updated and published.

        Operations issued on it afterwards may gather these parameters, or read them in place.
        """
        for event in (self._updated, self._published):
            self._device.current_stream().wait(event)

    def _on_cpu(self) -> list[RangeUpdate]:
        return [
            RangeUpdate(
                sub_group=index,
                tensors=self._states[index].cpu_tensors.narrow(element_range),
                element_range=element_range,
            )
            for index, element_range in self._ranges[Placement.CPU]
        ]

    def _copy_gradients_to_host(self) -> list[RangeUpdate]:
        """Issue the copies of the streamed ranges' gradients to host memory, and return the updates that read them."""
        updates: list[RangeUpdate] = []
        begin = 0
        with self._streams[Lane.D2H].issue():
            for index, element_range in self._ranges[Placement.STREAMED]:
                assert self._grads is not None
                state = self._states[index]
                # The buffer has 4 bytes per element whichever dtype the gradient has: users may set it in fp32.
                grad = (
                    self._grads.narrow(0, begin, element_range.numel)
                    .view(state.grad.dtype)
                    .narrow(0, 0, element_range.numel)
                )
                self._device.copy(grad, element_range.view(state.grad))
                param = element_range.view(state.param) if state.cpu_writes_param else None
                if self._rounded is not None:
                    param = self._rounded.narrow(0, begin, element_range.numel)
                tensors = AdamTensors(
                    master=element_range.view(state.master),
                    exp_avg=element_range.view(state.exp_avg),
                    exp_avg_sq=element_range.view(state.exp_avg_sq),
                    grad=grad,
                    param=param,
                )
                updates.append(RangeUpdate(sub_group=index, tensors=tensors, element_range=element_range))
                begin += element_range.numel
        self._streams[Lane.D2H].record(self._copied_to_host)
        return updates
