"""Probes of Adam, host memory, matrix products and collectives.

Each uses the streams, kernels, threads and process groups of training. It prepares its memory, and returns the function
that repeats the work once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import DEFAULT_BETAS, AdamKernel, AdamStep, AdamTensors
from deep_opt_states.device.slab import HostSlab
from deep_opt_states.profiler.copies import (
    Copies,
    KernelTimer,
    Probe,
    Rates,
    bytes_between,
    issue_copies,
    synchronize,
    timed,
    window_s,
)
from deep_opt_states.profiler.ranks import ProbeError, ProcessGroup
from perf_model.schedule.host_layout import Widths, slab_tensors
from perf_model.schedule.workload import STATES, Workload

SUB_GROUPS = 8
"""The number of sub-groups, updated one after another as in a step: when an update returns to the first, the others
have driven it out of the caches."""

LAUNCHES, MIN_LAUNCH_NUMEL = 2, 1_000_000
"""Kernel launches per repetition of Adam on the accelerator, and the fewest parameters that keep a GPU busy."""

COLLECTIVES = 4
"""Collectives that are timed per repetition, one after another."""


class HostStates:
    """The states of ``SUB_GROUPS`` sub-groups of a bf16 model, ``numel`` parameters in total, in one slab.

    As in training, ``kernel`` touches the pages first, called on ``thread``, and both are used to update the states
    later: a page is placed near the core that touches it first, which decides how fast it is updated on a machine with
    several sockets. The thread is not the caller's, because a kernel that pins its threads also pins the thread that
    calls it.

    Raise ``HostMemoryError`` if the memory cannot be reserved or page-locked.
    """

    def __init__(self, device: Device[Any], numel: int, kernel: AdamKernel) -> None:
        workload = Workload.from_numels([numel // SUB_GROUPS] * SUB_GROUPS)
        # DeepSpeed accumulates the gradients of a bf16 model in bf16 by default.
        widths = Widths(param=2, grad=2)
        self.kernel = kernel
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.slab = device.host_slab(widths.slab_bytes(workload))
        on_host: list[dict[str, torch.Tensor]] = [{} for _ in range(SUB_GROUPS)]
        for part in slab_tensors(workload, widths):
            dtype = torch.float32 if part.name in STATES else torch.bfloat16
            on_host[part.sub_group][part.name] = self.slab.tensor(part.offset_bytes, part.numel, dtype)
        self.sub_groups = [AdamTensors(param=tensors.pop("rounded"), **tensors) for tensors in on_host]
        try:
            for tensors in self.sub_groups:
                self.thread.submit(kernel.zero, tensors).result()
            self.slab.lock()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free the memory. No probe may use it afterwards."""
        self.thread.shutdown()
        self.sub_groups = []
        self.slab.close()


class Updates:
    """Adam steps of ``kernel`` on ``states``, all of which have a 16-bit ``param``."""

    def __init__(self, states: Sequence[AdamTensors], kernel: AdamKernel) -> None:
        self.states = states
        self.numel = sum(state.master.numel() for state in states)
        self._kernel = kernel
        self._step = 0
        kernel.restart()  # Other probes may have used the same kernel before.
        for state in states:
            assert state.param is not None
            # Touch every page now, also in the accelerator's memory, so that no timed update pays for it.
            for tensor, value in ((state.master, 1.0), (state.grad, 1e-2), (state.exp_avg, 0.0), (state.param, 0.0)):
                tensor.fill_(value)
            state.exp_avg_sq.fill_(0.0)

    def begin_step(self) -> None:
        """Start the next Adam step of all sub-groups."""
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
        self._kernel.begin_step([step] * len(self.states))

    def update_all(self) -> list[float]:
        """Update all sub-groups, and return the host's times at the start and after each of them."""
        times_s = [time.perf_counter()]
        for sub_group, state in enumerate(self.states):
            self._kernel.update(sub_group, state)
            times_s.append(time.perf_counter())
        return times_s

    def step(self) -> list[float]:
        """Do one step, and return the times of ``update_all``."""
        self.begin_step()
        return self.update_all()


def host_updates(memory: HostStates) -> Probe:
    """Return a probe of the work of a CPU_STEP of training, on the thread that touched ``memory`` first."""
    updates = Updates(memory.sub_groups, memory.kernel)

    def repeat() -> Rates:
        times_s = memory.thread.submit(updates.step).result()
        return {"cpu_adam_params_per_s": updates.numel / (times_s[-1] - times_s[0])}

    return repeat


def stock_updates(kernel: AdamKernel, memory: HostStates, device: Device[Any]) -> Probe:
    """Return a probe of stock's ``kernel`` on the caller's thread, with fp32 gradients that it scales in place."""
    in_fp32 = [replace(state, grad=device.empty_host(state.grad.numel(), torch.float32)) for state in memory.sub_groups]
    updates = Updates(in_fp32, kernel)

    def repeat() -> Rates:
        times_s = updates.step()
        return {"stock_cpu_adam_params_per_s": updates.numel / (times_s[-1] - times_s[0])}

    return repeat


def host_updates_during_copies(device: Device[Any], memory: HostStates, directions: Sequence[Copies]) -> Probe:
    """Return a probe that updates on the CPU while copies run both ways.

    Only the sub-groups count whose update overlaps with copies in both directions. The probe raises ``ProbeError`` if
    nothing overlapped.
    """
    updates = Updates(memory.sub_groups, memory.kernel)
    for _ in range(2):  # the first iteration warms up
        updated_s = memory.thread.submit(updates.step).result()
        origin_s = issue_copies(device, directions, 2)
        window_s(directions)
        pair_s = (time.perf_counter() - origin_s) / 2
    # The copies outlast an update, even if they slow it down to a third.
    count = 2 + int(3 * (updated_s[-1] - updated_s[0]) / pair_s)

    def repeat() -> Rates:
        # The copies are issued before the update starts: in training, too, the issuing thread is another one.
        origin_s = issue_copies(device, directions, count)
        updated_s = [time_s - origin_s for time_s in memory.thread.submit(updates.step).result()]
        start_s, end_s = window_s(directions)
        inside_s = [time_s for time_s in updated_s if start_s <= time_s <= end_s]
        if len(inside_s) < 2:
            raise ProbeError("no sub-group was updated while copies ran both ways: nothing overlapped")
        elapsed_s = inside_s[-1] - inside_s[0]
        updated = (len(inside_s) - 1) * updates.states[0].master.numel()
        return {
            "cpu_adam_beside_transfers_params_per_s": updated / elapsed_s,
            "both_beside_cpu_adam_bytes_per_s": bytes_between(directions, inside_s[0], inside_s[-1]) / elapsed_s,
        }

    return repeat


def device_updates(device: Device[Any], numel: int, kernel: AdamKernel) -> Probe:
    """Return a probe of Adam on the accelerator as in training: ``LAUNCHES`` launches of ``numel`` parameters each.

    If memory is short, each launch updates fewer parameters. The states of one launch are larger than the GPU's caches,
    so that each launch reads its states from the GPU's memory.
    """
    updates = Updates(_states_that_fit(device, numel), kernel)
    timer = KernelTimer(device)
    synchronize(device)

    def repeat() -> Rates:
        updates.begin_step()
        return {"gpu_adam_params_per_s": updates.numel / timer.seconds_of(updates.update_all)}

    return repeat


def _states_that_fit(device: Device[Any], numel: int) -> list[AdamTensors]:
    """Return states of ``LAUNCHES`` sub-groups of a bf16 model. Halve ``numel`` until they fit in the memory."""
    dtypes = {**dict.fromkeys(STATES, torch.float32), "grad": torch.bfloat16, "param": torch.bfloat16}
    while True:
        try:
            return [
                AdamTensors(**{name: device.empty(numel, dtype) for name, dtype in dtypes.items()})
                for _ in range(LAUNCHES)
            ]
        except torch.OutOfMemoryError:
            if numel // 2 < MIN_LAUNCH_NUMEL:
                raise
        numel //= 2


def host_memory(slab: HostSlab) -> Probe:
    """Return a probe of memory that was touched and page-locked as in training: multiplied in place, then copied."""
    memory = slab.tensor(0, slab.size_bytes // 4, torch.float32).fill_(1)
    half, other_half = memory.chunk(2)

    def repeat() -> Rates:
        times_s = [time.perf_counter()]
        # The value stays in the range in which all products are equally fast: denormal numbers are slow.
        memory.mul_(-1.0)
        times_s.append(time.perf_counter())
        half[: other_half.numel()].copy_(other_half)
        times_s.append(time.perf_counter())
        update_s, copy_s = (end_s - start_s for start_s, end_s in pairwise(times_s))
        return {
            "dram_update_bytes_per_s": 2 * memory.nbytes / update_s,
            "dram_copy_bytes_per_s": 2 * other_half.nbytes / copy_s,
        }

    return repeat


def matrix_products(device: Device[Any], rows_of: Mapping[str, int]) -> Probe:
    """Return a probe that multiplies two bf16 matrices of shape [rows, rows], for each quantity in ``rows_of``.

    The probe returns FLOP/s. The matrices are random, because a GPU needs less power for constants and runs faster.
    """
    # The timer uses the caller's stream: cuBLAS keeps a workspace for every stream that it has been used on.
    timer = KernelTimer(device)
    size = max(rows_of.values())
    # Use an own generator: the random numbers of training must not depend on whether a profile was measured.
    generator = torch.Generator().manual_seed(0)
    left, right, product = (device.empty(size * size, torch.bfloat16) for _ in range(3))
    for matrix in (left, right):
        device.copy(matrix, torch.rand(size * size, generator=generator, dtype=torch.float32, device="cpu"))
    synchronize(device)

    def seconds_of(rows: int) -> float:
        # The small matrices consist of the first elements of the large ones.
        a, b, c = (elements[: rows * rows].view(rows, rows) for elements in (left, right, product))
        return timer.seconds_of(lambda: torch.mm(a, b, out=c))

    return lambda: {quantity: 2 * rows**3 / seconds_of(rows) for quantity, rows in rows_of.items()}


def collective(
    device: Device[Any], group: ProcessGroup, whole_bytes: int, quantity: str, *, reduces: bool = False
) -> Probe:
    """Return a probe of all-gathers, or of reduce-scatters if ``reduces``, of ``whole_bytes`` in bf16.

    Each rank of ``group`` holds an equal part. The value is the bytes per second that a rank receives in an all-gather,
    or sends in a reduce-scatter: all parts but its own.
    """
    numel = whole_bytes // torch.bfloat16.itemsize // group.size
    part, whole = (device.empty(count, torch.bfloat16).fill_(1) for count in (numel, numel * group.size))
    issue = partial(group.reduce_scatter, part, whole) if reduces else partial(group.all_gather, whole, part)
    synchronize(device)

    def repeat() -> Rates:
        # The first collective is not timed: its start depends on when the other ranks issue it. The others are issued
        # while it runs, so that the time includes no launches.
        elapsed_s, _ = timed(device, lambda: [issue() for _ in range(COLLECTIVES)], first=issue)
        return {quantity: COLLECTIVES * whole.nbytes * (group.size - 1) / group.size / elapsed_s}

    return repeat
