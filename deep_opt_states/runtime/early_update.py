"""The parts that are updated and published as soon as the step is decided, before the schedule is.

They are small: of the parameters that DeepSpeed keeps gathered. All but a resident's are updated in host memory, in one
call. Of a streamed sub-group the gradient goes down for that; its slot may have been filled before, and is not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from deep_opt_states.device.interface import Device, Stream
from deep_opt_states.device.kernels.adam import AdamKernel, AdamTensors, Part, PartUpdate
from deep_opt_states.runtime.state import SubGroupState
from deep_opt_states.runtime.worker import CpuLane
from perf_model.schedule.action import Lane
from perf_model.schedule.placement import Placement


class FirstParts:
    """``parts`` with the sub-group's placement and number. Reserves host memory for what is streamed: a gradient, which
    is fp32 if users have set it, and a parameter, unless the CPU can write that where the model has it."""

    def __init__(
        self,
        parts: Iterable[tuple[Placement, int, Part]],
        states: Sequence[SubGroupState],
        device: Device[Any],
        streams: Mapping[Lane, Stream[Any]],
        worker: CpuLane,
    ) -> None:
        self._states = states
        self._device = device
        self._streams = streams
        self._worker = worker
        self._parts: dict[Placement, list[tuple[int, Part]]] = {placement: [] for placement in Placement}
        for placement, index, part in parts:
            self._parts[placement].append((index, part))
        self._grads = self._rounded = None
        if numel := sum(part.numel for _, part in self._parts[Placement.STREAMED]):
            self._grads = device.empty_host(numel, torch.float32)
            streamed = (states[index] for index, _ in self._parts[Placement.STREAMED])
            if states[0].param.dtype != torch.float32 and not any(state.cpu_writes_param for state in streamed):
                self._rounded = device.empty_host(numel, states[0].param.dtype)
        self._gone_down, self._updated, self._published = (device.event() for _ in range(3))

    def update(self, host_adam: AdamKernel, device_adam: AdamKernel | None) -> None:
        """Update all parts. The host waits for those in its memory, the caller's stream for all parameters."""
        if not any(self._parts.values()):
            return
        with self._streams[Lane.COMPUTE].issue():
            for index, part in self._parts[Placement.RESIDENT]:
                assert device_adam is not None
                state = self._states[index]
                resident = PartUpdate(sub_group=index, tensors=state.at(state).part(part), part=part)
                device_adam.update_parts([resident])
                if state.staged is not None:
                    # Before the next one is staged in the same memory.
                    self._device.copy(part.view(state.param), part.view(state.staged))
        self._streams[Lane.COMPUTE].record(self._updated)
        in_host_memory = [*self._on_cpu(), *self._gradients_down()]

        def update() -> None:
            self._gone_down.synchronize()
            host_adam.update_parts(in_host_memory)

        self._worker.submit(update).result()
        with self._streams[Lane.H2D].issue():
            for each in in_host_memory:
                state = self._states[each.sub_group]
                if not state.cpu_writes_param:
                    source = each.tensors.master if each.tensors.param is None else each.tensors.param
                    self._device.copy(each.part.view(state.param), source)
        self._streams[Lane.H2D].record(self._published)
        self.wait()

    def wait(self) -> None:
        """What is issued from now on on the current stream may gather these parameters, or read them in place."""
        for event in (self._updated, self._published):
            self._device.current_stream().wait(event)

    def _on_cpu(self) -> list[PartUpdate]:
        return [
            PartUpdate(sub_group=index, tensors=self._states[index].on_host.part(part), part=part)
            for index, part in self._parts[Placement.CPU]
        ]

    def _gradients_down(self) -> list[PartUpdate]:
        """Issue the copies of the streamed parts' gradients to host memory, and return the updates that read them."""
        updates: list[PartUpdate] = []
        begin = 0
        with self._streams[Lane.D2H].issue():
            for index, part in self._parts[Placement.STREAMED]:
                assert self._grads is not None
                state = self._states[index]
                # Each part has room for fp32, whichever dtype its gradient has: users set some of them.
                grad = self._grads.narrow(0, begin, part.numel).view(state.grad.dtype).narrow(0, 0, part.numel)
                self._device.copy(grad, part.view(state.grad))
                param = part.view(state.param) if state.cpu_writes_param else None
                if self._rounded is not None:
                    param = self._rounded.narrow(0, begin, part.numel)
                tensors = AdamTensors(
                    master=part.view(state.master),
                    exp_avg=part.view(state.exp_avg),
                    exp_avg_sq=part.view(state.exp_avg_sq),
                    grad=grad,
                    param=param,
                )
                updates.append(PartUpdate(sub_group=index, tensors=tensors, part=part))
                begin += part.numel
        self._streams[Lane.D2H].record(self._gone_down)
        return updates
