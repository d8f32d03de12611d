"""The parts that are updated and published as soon as the step is decided, before the schedule is.

They are small: of the parameters that DeepSpeed keeps gathered. All but a resident's are updated in host memory. Of a
streamed sub-group the gradient goes down for that; its slot may have been filled before, and is not looked at here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from deep_opt_states.device.interface import Device, Stream
from deep_opt_states.device.kernels.adam import AdamKernel, AdamTensors, Part
from deep_opt_states.runtime.state import SubGroupState
from deep_opt_states.runtime.worker import CpuLane
from perf_model.action import Lane
from perf_model.placement import Placement


class FirstParts:
    """``parts`` with the sub-group's placement and number. Reserves host memory for what is streamed: a gradient, which
    is fp32 if users have set it, and a parameter."""

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
            if states[0].param.dtype != torch.float32:
                self._rounded = device.empty_host(numel, states[0].param.dtype)
        self._gone_down, self._updated, self._published = (device.event() for _ in range(3))

    def update(self, host_adam: AdamKernel, device_adam: AdamKernel | None) -> None:
        """The host waits for the update in its memory, the caller's stream for the parameters."""
        if not any(self._parts.values()):
            return
        with self._streams[Lane.COMPUTE].issue():
            for index, part in self._parts[Placement.RESIDENT]:
                assert device_adam is not None
                device_adam.update(index, self._states[index].at(self._states[index]).part(part), part)
        self._streams[Lane.COMPUTE].record(self._updated)
        streamed = self._gradients_down()
        on_cpu = [(index, part, self._states[index].on_host.part(part)) for index, part in self._parts[Placement.CPU]]

        def update() -> None:
            self._gone_down.synchronize()
            for index, part, tensors in (*on_cpu, *streamed):
                host_adam.update(index, tensors, part)

        self._worker.submit(update).result()
        with self._streams[Lane.H2D].issue():
            for index, part, tensors in (*on_cpu, *streamed):
                source = tensors.master if tensors.param is None else tensors.param
                self._device.copy(part.view(self._states[index].param), source)
        self._streams[Lane.H2D].record(self._published)
        self.wait()

    def wait(self) -> None:
        """What is issued from now on on the current stream may gather these parameters, or read them in place."""
        for event in (self._updated, self._published):
            self._device.current_stream().wait(event)

    def _gradients_down(self) -> list[tuple[int, Part, AdamTensors]]:
        """The streamed parts, whose gradients are on their way to host memory."""
        parts: list[tuple[int, Part, AdamTensors]] = []
        begin = 0
        with self._streams[Lane.D2H].issue():
            for index, part in self._parts[Placement.STREAMED]:
                assert self._grads is not None
                state = self._states[index]
                grad = self._grads.view(state.grad.dtype).narrow(0, begin, part.numel)
                self._device.copy(grad, part.view(state.grad))
                tensors = AdamTensors(
                    master=part.view(state.master),
                    exp_avg=part.view(state.exp_avg),
                    exp_avg_sq=part.view(state.exp_avg_sq),
                    grad=grad,
                    param=None if self._rounded is None else self._rounded.narrow(0, begin, part.numel),
                )
                parts.append((index, part, tensors))
                begin += part.numel
        self._streams[Lane.D2H].record(self._gone_down)
        return parts
