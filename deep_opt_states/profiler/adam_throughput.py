"""Measure Adam as training runs it: on the CPU alone, on the CPU during transfers both ways, and on the accelerator."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import DEFAULT_BETAS, AdamKernel, AdamStep, AdamTensors
from deep_opt_states.profiler.device_timer import DeviceTimer
from deep_opt_states.profiler.host_states import SUB_GROUPS, HostStates
from deep_opt_states.profiler.method import Rates
from deep_opt_states.profiler.ranks import ProbeError
from deep_opt_states.profiler.transfers import Copies, bytes_between, issue_both, synchronize

LAUNCHES = 2
"""Kernel launches per repetition of the accelerator's probe."""

MIN_LAUNCH_NUMEL = 1_000_000
"""The smallest number of parameters per launch: fewer would not keep a GPU busy."""


class Updates:
    """Adam steps of ``kernel`` on ``states``, all of which have a 16-bit ``param``."""

    def __init__(self, states: Sequence[AdamTensors], kernel: AdamKernel) -> None:
        self.states = states
        self.kernel = kernel
        self._step = 0
        kernel.restart()  # Other probes may have used the same kernel before.
        for state in states:
            assert state.param is not None
            # Touch every page now, also in the accelerator's memory, so that no timed update pays for it.
            for tensor, value in ((state.master, 1.0), (state.grad, 1e-2), (state.exp_avg, 0.0), (state.param, 0.0)):
                tensor.fill_(value)
            state.exp_avg_sq.fill_(0.0)

    def begin_step(self) -> None:
        """Begin the next Adam step of all sub-groups."""
        self._step += 1
        step = AdamStep(
            step=self._step,
            lr=1e-3,
            beta1=DEFAULT_BETAS[0],
            beta2=DEFAULT_BETAS[1],
            eps=1e-8,
            weight_decay=0.01,
            bias_correction=True,
            # The scale alternates, because stock scales the gradient in place and would drive it out of range.
            grad_scale=2.0 if self._step % 2 else 0.5,
        )
        self.kernel.begin_step([step] * len(self.states))

    def update(self, sub_group: int) -> None:
        """Update one sub-group in the current step."""
        self.kernel.update(sub_group, self.states[sub_group])

    def verify(self) -> None:
        """Raise ``ProbeError`` unless all elements changed equally, as they must, since they started with equal values.

        The parameters must be the rounded masters.
        """
        for sub_group, state in enumerate(self.states):
            smallest, largest = (value.item() for value in state.master.aminmax())
            # Vector code and the code for the remainder may differ in the last bits.
            if not (smallest <= largest < 1.0 and largest - smallest < 1e-4):
                raise ProbeError(
                    f"the elements of sub-group {sub_group} are not updated equally: "
                    f"they are {smallest} to {largest} and were 1.0"
                )
            if state.param is None or not torch.equal(state.param, state.master.bfloat16()):
                raise ProbeError(f"the parameters of sub-group {sub_group} are not its masters rounded to 16 bits")


class HostUpdates:
    """A probe that does the work of a CPU_STEP of training (``Executor``) on ``thread``, or on the caller's if None."""

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
    def with_training_threads(cls, memory: HostStates) -> HostUpdates:
        """Return updates on the threads that touched ``memory`` first."""
        return cls(memory.sub_groups, memory.kernel, memory.thread)

    @classmethod
    def with_own_threads(cls, kernel: AdamKernel, memory: HostStates) -> HostUpdates:
        """Return updates by another kernel, whose threads live as long as the returned probe."""
        thread = ThreadPoolExecutor(max_workers=1)
        updates = cls(memory.sub_groups, kernel, thread)
        # OpenMP's threads end with the thread that called them. They must end: OpenMP counts all of them, also those
        # that sleep, and lets none spin while it waits if there are more threads than cores.
        weakref.finalize(updates, thread.shutdown)
        return updates

    @classmethod
    def with_stock_kernel(cls, kernel: AdamKernel, memory: HostStates, device: Device[Any]) -> HostUpdates:
        """Return updates by stock's kernel on the caller's thread, with fp32 gradients that it scales in place."""
        in_fp32 = [
            replace(tensors, grad=device.empty_host(tensors.grad.numel(), torch.float32))
            for tensors in memory.sub_groups
        ]
        return cls(in_fp32, kernel, None, "stock_cpu_adam_params_per_s")

    def repeat(self) -> Rates:
        """Update all sub-groups once and return the parameters updated per second."""
        times_s = self.run()
        return {self._quantity: SUB_GROUPS * self.sub_group_numel / (times_s[-1] - times_s[0])}

    def run(self) -> list[float]:
        """Return when the first sub-group's update began and when each update ended, in ``time.perf_counter`` seconds.

        The list has one more entry than there are sub-groups.
        """
        return self._run() if self._thread is None else self._thread.submit(self._run).result()

    def verify(self) -> None:
        """Raise ``ProbeError`` if the states are not those of an Adam step."""
        self._updates.verify()

    def _run(self) -> list[float]:
        self._updates.begin_step()
        times_s = [time.perf_counter()]
        for sub_group in range(SUB_GROUPS):
            self._updates.update(sub_group)
            times_s.append(time.perf_counter())
        return times_s


class HostUpdatesDuringTransfers:
    """A probe that updates on the CPU while copies run both ways.

    Only the sub-groups count whose update overlaps with copies in both directions.
    """

    def __init__(self, device: Device[Any], updates: HostUpdates, h2d: Copies, d2h: Copies) -> None:
        self._device = device
        self._updates = updates
        self._directions = (h2d, d2h)
        self._count = self._count_that_outlasts_updates()

    def repeat(self) -> Rates:
        """Issue all copies, update all sub-groups once, and return the rates of both while they overlapped.

        The copies are issued before the update begins, because the thread that issues them is the one that updates.
        Raise ``ProbeError`` if nothing overlapped.
        """
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
        """Raise ``ProbeError`` if a state or a copied element is wrong."""
        self._updates.verify()
        for copies in self._directions:
            copies.verify()

    def _count_that_outlasts_updates(self) -> int:
        """Return the number of copies per direction that outlast an update, even if they slow it down to a third."""
        for _ in range(2):  # the first iteration warms up
            updated_s = self._updates.run()
            origin_s = issue_both(self._device, self._directions, 2)
            for copies in self._directions:
                copies.times_s()
            pair_s = (time.perf_counter() - origin_s) / 2
        return 2 + int(3 * (updated_s[-1] - updated_s[0]) / pair_s)


class DeviceUpdates:
    """A probe that times Adam on the accelerator as in training: ``LAUNCHES`` launches of ``numel`` parameters each.

    If memory is short, each launch updates fewer parameters. The states of one launch are larger than the GPU's caches,
    so that each launch reads its states from the GPU's memory.
    """

    def __init__(self, device: Device[Any], numel: int, kernel: AdamKernel) -> None:
        stream = device.stream()
        self._timer = DeviceTimer(device, stream)
        self._updates = Updates(_states_that_fit(device, numel), kernel)
        synchronize(device)

    def repeat(self) -> Rates:
        """Launch one step and return the parameters updated per second of the accelerator's time."""
        self._updates.begin_step()
        elapsed_s = self._timer.seconds_of(self._launch)
        numel = sum(state.master.numel() for state in self._updates.states)
        return {"gpu_adam_params_per_s": numel / elapsed_s}

    def verify(self) -> None:
        """Raise ``ProbeError`` if the states are not those of an Adam step."""
        self._updates.verify()

    def _launch(self) -> None:
        for sub_group in range(LAUNCHES):
            self._updates.update(sub_group)


def _states_that_fit(device: Device[Any], numel: int) -> list[AdamTensors]:
    """Return states of ``LAUNCHES`` sub-groups of ``numel`` parameters each.

    Halve ``numel`` until they fit in the accelerator's memory. Raise ``torch.OutOfMemoryError`` if even
    ``MIN_LAUNCH_NUMEL`` parameters do not fit.
    """
    while True:
        try:
            return [_state(device, numel) for _ in range(LAUNCHES)]
        except torch.OutOfMemoryError:
            if numel // 2 < MIN_LAUNCH_NUMEL:
                raise
        numel //= 2


def _state(device: Device[Any], numel: int) -> AdamTensors:
    """Return the states of a sub-group of a bf16 model, whose gradients DeepSpeed accumulates in bf16 by default."""
    master, exp_avg, exp_avg_sq = (device.empty(numel, torch.float32) for _ in range(3))
    grad, param = (device.empty(numel, torch.bfloat16) for _ in range(2))
    return AdamTensors(master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grad=grad, param=param)
