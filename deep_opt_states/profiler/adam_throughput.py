"""Adam as training runs it: on the CPU alone, on the CPU while transfers run both ways, and on the accelerator."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamKernel, AdamStep, AdamTensors
from deep_opt_states.profiler.device_timer import DeviceTimer
from deep_opt_states.profiler.host_states import SUB_GROUPS, HostStates
from deep_opt_states.profiler.method import Rates
from deep_opt_states.profiler.ranks import ProbeError
from deep_opt_states.profiler.transfers import Copies, bytes_between, finish, issue_both

LAUNCHES = 2

LEAST_LAUNCH_NUMEL = 1_000_000
"""A launch of fewer parameters would not keep a GPU busy."""


class Updates:
    """Updates of ``states`` by ``kernel``, step after step; all of them have the 16-bit ``param``."""

    def __init__(self, states: Sequence[AdamTensors], kernel: AdamKernel) -> None:
        self.states = states
        self.kernel = kernel
        self._step = 0
        kernel.restart()  # Other probes may have updated by it before.
        for state in states:
            assert state.param is not None
            # Writing touches every page, also of the accelerator's memory, so that no update is the first to.
            for tensor, value in ((state.master, 1.0), (state.grad, 1e-2), (state.exp_avg, 0.0), (state.param, 0.0)):
                tensor.fill_(value)
            state.exp_avg_sq.fill_(0.0)

    def begin_step(self) -> None:
        self._step += 1
        step = AdamStep(
            step=self._step,
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=0.01,
            bias_correction=True,
            # By turns, so that stock's, which scales the gradient in place, leaves it in range.
            grad_scale=2.0 if self._step % 2 else 0.5,
        )
        self.kernel.begin_step([step] * len(self.states))

    def update(self, sub_group: int) -> None:
        self.kernel.update(sub_group, self.states[sub_group])

    def verify(self) -> None:
        """Constants went in, so every element has moved, and to the same place as the others."""
        for sub_group, state in enumerate(self.states):
            least, most = (value.item() for value in state.master.aminmax())
            # Vectors and their remainder need not agree in the last bits.
            if not (least <= most < 1.0 and most - least < 1e-4):
                raise ProbeError(f"sub-group {sub_group} is not updated alike: from {least} to {most} after 1.0")
            if state.param is None or not torch.equal(state.param, state.master.bfloat16()):
                raise ProbeError(f"sub-group {sub_group} is not rounded to 16 bit")


class HostUpdates:
    """All that a CPU_STEP of training does (``Executor``), on ``thread``; on the caller's where that is None."""

    def __init__(
        self,
        states: Sequence[AdamTensors],
        kernel: AdamKernel,
        thread: ThreadPoolExecutor | None,
        quantity: str = "cpu_adam_params_per_s",
    ) -> None:
        self._updates = Updates(states, kernel)
        self._thread = thread
        self._quantity = quantity
        self.sub_group_numel = states[0].master.numel()

    @classmethod
    def as_in_training(cls, memory: HostStates) -> HostUpdates:
        """Return updates by the threads that touched ``memory`` first."""
        return cls(memory.sub_groups, memory.kernel, memory.thread)

    @classmethod
    def by(cls, kernel: AdamKernel, memory: HostStates) -> HostUpdates:
        """Return updates by another kernel, which has threads of its own as long as they are measured."""
        thread = ThreadPoolExecutor(max_workers=1)
        updates = cls(memory.sub_groups, kernel, thread)
        # OpenMP's threads end with the one that called them. OpenMP counts them all, also those that sleep, and lets
        # none wait without sleeping where there are more than cores.
        weakref.finalize(updates, thread.shutdown)
        return updates

    @classmethod
    def by_stock(cls, kernel: AdamKernel, memory: HostStates, device: Device[Any]) -> HostUpdates:
        """Return updates by stock's kernel, which reads and scales gradients in fp32, on the thread that trains."""
        in_fp32 = [
            replace(tensors, grad=device.empty_host(tensors.grad.numel(), torch.float32))
            for tensors in memory.sub_groups
        ]
        return cls(in_fp32, kernel, None, "stock_cpu_adam_params_per_s")

    def repeat(self) -> Rates:
        times_s = self.run()
        return {self._quantity: SUB_GROUPS * self.sub_group_numel / (times_s[-1] - times_s[0])}

    def run(self) -> list[float]:
        """When the first sub-group's update began and when each one's ended, by ``time.perf_counter``."""
        return self._run() if self._thread is None else self._thread.submit(self._run).result()

    def verify(self) -> None:
        self._updates.verify()

    def _run(self) -> list[float]:
        self._updates.begin_step()
        times_s = [time.perf_counter()]
        for sub_group in range(SUB_GROUPS):
            self._updates.update(sub_group)
            times_s.append(time.perf_counter())
        return times_s


class HostUpdatesBesideTransfers:
    """The same while copies run both ways. Only sub-groups that are updated while both directions work are counted."""

    def __init__(self, device: Device[Any], updates: HostUpdates, h2d: Copies, d2h: Copies) -> None:
        self._device = device
        self._updates = updates
        self._directions = (h2d, d2h)
        self._count = self._enough()

    def repeat(self) -> Rates:
        """The copies are issued ahead: the thread that would issue them updates."""
        origin_s = issue_both(self._device, self._directions, self._count)
        updated_s = [time_s - origin_s for time_s in self._updates.run()]
        copied_s = [copies.times_s() for copies in self._directions]
        start_s, end_s = max(times[0] for times in copied_s), min(times[-1] for times in copied_s)
        inside_s = [time_s for time_s in updated_s if start_s <= time_s <= end_s]
        if len(inside_s) < 2:
            raise ProbeError("no sub-group was updated while copies ran both ways: nothing overlapped")
        window_s = inside_s[-1] - inside_s[0]
        return {
            "cpu_adam_beside_transfers_params_per_s": (len(inside_s) - 1) * self._updates.sub_group_numel / window_s,
            "both_beside_cpu_adam_bytes_per_s": (
                bytes_between(self._directions, copied_s, inside_s[0], inside_s[-1]) / window_s
            ),
        }

    def verify(self) -> None:
        self._updates.verify()
        for copies in self._directions:
            copies.verify()

    def _enough(self) -> int:
        """Copies each way that outlast an update, even one that they slow down to a third."""
        for _ in range(2):  # the first one is the warm-up
            updated_s = self._updates.run()
            origin_s = issue_both(self._device, self._directions, 2)
            for copies in self._directions:
                copies.times_s()
            pair_s = (time.perf_counter() - origin_s) / 2
        return 2 + int(3 * (updated_s[-1] - updated_s[0]) / pair_s)


class DeviceUpdates:
    """A probe that times Adam on the accelerator as training launches it, ``LAUNCHES`` times ``numel`` parameters.

    It takes fewer parameters where memory is short. One launch updates enough to drive its own states out of the GPU's
    caches.
    """

    def __init__(self, device: Device[Any], numel: int, kernel: AdamKernel) -> None:
        stream = device.stream()
        self._timer = DeviceTimer(device, stream)
        self._updates = Updates(_states_that_fit(device, numel), kernel)
        finish(device)

    def repeat(self) -> Rates:
        self._updates.begin_step()
        elapsed_s = self._timer.seconds_of(self._launch)
        numel = sum(state.master.numel() for state in self._updates.states)
        return {"gpu_adam_params_per_s": numel / elapsed_s}

    def verify(self) -> None:
        self._updates.verify()

    def _launch(self) -> None:
        for sub_group in range(LAUNCHES):
            self._updates.update(sub_group)


def _states_that_fit(device: Device[Any], numel: int) -> list[AdamTensors]:
    """Return states of ``LAUNCHES`` sub-groups of ``numel`` parameters, or of half as many, again and again, where the
    accelerator has no memory for them."""
    while True:
        try:
            return [_state(device, numel) for _ in range(LAUNCHES)]
        except torch.OutOfMemoryError:
            if numel // 2 < LEAST_LAUNCH_NUMEL:
                raise
        numel //= 2


def _state(device: Device[Any], numel: int) -> AdamTensors:
    """Of a bf16 model, whose gradients DeepSpeed accumulates in bf16 by default."""
    master, exp_avg, exp_avg_sq = (device.empty(numel, torch.float32) for _ in range(3))
    grad, param = (device.empty(numel, torch.bfloat16) for _ in range(2))
    return AdamTensors(master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grad=grad, param=param)
