"""Repeat one kind of work as training does it, and time it: copies, Adam, host memory, products and collectives."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch

from deep_opt_states.device.interface import Device, Event
from deep_opt_states.device.kernels.adam import DEFAULT_BETAS, AdamKernel, AdamStep, AdamTensors, StateDtypes
from deep_opt_states.device.slab import HostSlab
from perf_model.schedule.host_layout import Widths, slab_tensors
from perf_model.schedule.workload import STATES, Workload

Rates: TypeAlias = Mapping[str, float]
"""Values by the names in ``perf_model.prediction.hardware.QUANTITIES``."""

Probe: TypeAlias = Callable[[], Rates]
"""A function that does one kind of work once, and returns the measured values."""

INITIAL_BUSY_S, MAX_BUSY_S = 2e-3, 0.5
"""The first and the longest time for which a stream is kept busy while work is issued."""

SUB_GROUPS = 8
"""The sub-groups of a step. When an update returns to the first one, the others have evicted it from the caches."""

FULL_RATE = 0.97
"""The share of the highest rate of updates on the CPU that counts as all of it: measurements differ by as much."""

LAUNCHES, MIN_LAUNCH_NUMEL = 2, 1_000_000
"""Kernel launches per repetition of Adam on the accelerator, and the fewest parameters that keep a GPU busy."""


class ProbeError(RuntimeError):
    """An error for a probe that cannot run, or whose result cannot be trusted."""


def slowest(by_rank: Sequence[Rates]) -> Rates:
    """Return the value of the slowest rank for each name: quantities without "_per_s" are times."""
    return {name: (min if name.endswith("_per_s") else max)(values[name] for values in by_rank) for name in by_rank[0]}


def timed(
    device: Device[Any], issue: Callable[[], object], first: Callable[[], object] = lambda: None
) -> tuple[float, bool]:
    """Return the seconds of the work of ``issue``, and whether it was queued behind the untimed work of ``first``."""
    begin, end, stream = device.event(), device.event(), device.current_stream()
    first()
    stream.record(begin)
    issue()
    was_queued = not begin.finished()
    stream.record(end)
    end.synchronize()
    return end.seconds_after(begin), was_queued


class KernelTimer:
    """A timer of kernels without their launches, which keeps the current stream busy until all work is queued."""

    def __init__(self, device: Device[Any]) -> None:
        self._device = device
        self._busy_s = INITIAL_BUSY_S

    def seconds_of(self, issue: Callable[[], object]) -> float:
        """Return the seconds of the work of ``issue``. Raise ``ProbeError`` if it cannot be queued fast enough."""
        while True:
            elapsed_s, was_queued = timed(self._device, issue, partial(self._device.occupy, self._busy_s))
            if was_queued or self._device.shares_host_memory:
                return elapsed_s
            if self._busy_s >= MAX_BUSY_S:
                raise ProbeError(
                    f"the time would be that of the launches and not of the kernels: the stream was idle before all "
                    f"work was issued, although it was kept busy for {self._busy_s:.3g} s"
                )
            self._busy_s = min(4 * self._busy_s, MAX_BUSY_S)


def synchronize(device: Device[Any]) -> None:
    """Wait for the work that was issued on the caller's stream."""
    timed(device, lambda: None)


class Copies:
    """Repeated copies of ``source`` to ``destination`` (fp32, [numel]) on a stream, with an event after each copy."""

    def __init__(self, device: Device[Any], destination: torch.Tensor, source: torch.Tensor) -> None:
        self.stream = device.stream()
        self.nbytes = source.nbytes
        self._device = device
        self._destination, self._source = destination.fill_(0), source.fill_(1)
        synchronize(device)

    def begin(self, origin: Event) -> None:
        """Make the following copies start after ``origin``, from which ``times_s`` then counts."""
        self.stream.wait(origin)
        self._origin = origin
        self._marks = [self._mark()]

    def issue(self) -> None:
        """Issue one copy on the stream."""
        with self.stream.issue():
            self._device.copy(self._destination, self._source)
        self._marks.append(self._mark())

    def times_s(self) -> list[float]:
        """Wait for all copies, and return when the first copy started and when each copy ended."""
        self._marks[-1].synchronize()
        return [mark.seconds_after(self._origin) for mark in self._marks]

    def _mark(self) -> Event:
        mark: Event = self._device.event()
        self.stream.record(mark)
        return mark


def h2d(device: Device[Any], nbytes: int, *, pinned: bool = True) -> Copies:
    """Return copies of ``nbytes`` bytes each from host memory, pinned or pageable, to the accelerator."""
    return Copies(device, device.empty(nbytes // 4, torch.float32), _on_host(device, nbytes, pinned))


def d2h(device: Device[Any], nbytes: int, *, pinned: bool = True) -> Copies:
    """Return copies of ``nbytes`` bytes each from the accelerator to host memory, pinned or pageable."""
    return Copies(device, _on_host(device, nbytes, pinned), device.empty(nbytes // 4, torch.float32))


def _on_host(device: Device[Any], nbytes: int, pinned: bool) -> torch.Tensor:
    make = device.empty_host if pinned else partial(torch.empty, device="cpu")
    return make(nbytes // 4, dtype=torch.float32)


def issue_copies(device: Device[Any], directions: Sequence[Copies], count: int) -> float:
    """Issue ``count`` copies per direction, alternating, and return the host's time from which ``times_s`` counts."""
    origin: Event = device.event()
    directions[0].stream.record(origin)
    origin.synchronize()
    origin_s = time.perf_counter()
    for copies in directions:
        copies.begin(origin)
    for _ in range(count):
        for copies in directions:
            copies.issue()
    return origin_s


def window_s(directions: Sequence[Copies]) -> tuple[float, float]:
    """Wait for the copies, and return when the last direction started and when the first one ended."""
    times_s = [copies.times_s() for copies in directions]
    return max(times[0] for times in times_s), min(times[-1] for times in times_s)


def bytes_between(directions: Sequence[Copies], start_s: float, end_s: float) -> float:
    """Return the bytes that all copies moved in this time. A copy that is partly inside counts in proportion."""
    moved = 0.0
    for copies in directions:
        for begun_s, ended_s in pairwise(copies.times_s()):
            inside_s = min(ended_s, end_s) - max(begun_s, start_s)
            if inside_s > 0:
                moved += copies.nbytes * inside_s / (ended_s - begun_s)
    return moved


def bandwidth(device: Device[Any], directions: Sequence[Copies], count: int, quantity: str) -> Probe:
    """Return a probe of ``count`` copies in each direction: the bytes per second while all directions work."""

    def repeat() -> Rates:
        issue_copies(device, directions, count)
        start_s, end_s = window_s(directions)
        return {quantity: bytes_between(directions, start_s, end_s) / (end_s - start_s)}

    return repeat


def latency(device: Device[Any], copies: Copies, count: int = 64) -> Probe:
    """Return a probe of the fixed cost of a copy: it times copies of few bytes, with the events after them."""
    repeat = bandwidth(device, [copies], count, "bytes_per_s")
    return lambda: {"copy_latency_s": copies.nbytes / repeat()["bytes_per_s"]}


class HostStates:
    """The states of ``SUB_GROUPS`` sub-groups of a bf16 model, ``numel`` parameters in total, in one slab.

    ``thread`` touches the pages first and updates them later, as in training. It is not the caller's thread, because a
    kernel that pins its threads also pins the calling thread. Raise ``HostMemoryError`` if the memory is refused.
    """

    def __init__(self, device: Device[Any], numel: int, kernel: AdamKernel) -> None:
        workload = Workload.from_numels([numel // SUB_GROUPS] * SUB_GROUPS)
        # By default, DeepSpeed accumulates the gradients of a bf16 model in bf16.
        widths = Widths(param=2, grad=2)
        self.kernel = kernel
        self.publishes = not device.shares_host_memory
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
    """Adam steps of ``kernel`` on ``states``, whose gradients are multiplied by the ``grad_scales`` in turn.

    By default they are not clipped. Stock scales them in place, so that the scales must alternate.
    """

    def __init__(
        self, states: Sequence[AdamTensors], kernel: AdamKernel, grad_scales: Sequence[float] = (1.0,)
    ) -> None:
        self.states = states
        self._grad_scales = grad_scales
        self.numel = sum(state.master.numel() for state in states)
        self._kernel = kernel
        self._step = 0
        kernel.restart()  # Other probes may have used the same kernel before.
        for state in states:
            # Touch every page now, also on the accelerator, so that no timed update does.
            for name, tensor in vars(state).items():
                if tensor is not None:
                    tensor.fill_({"master": 1.0, "grad": 1e-2}.get(name, 0.0))

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
            grad_scale=self._grad_scales[self._step % len(self._grad_scales)],
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
        self.begin_step()
        return self.update_all()

    def params_per_s(self, times_s: Sequence[float]) -> float:
        return self.numel / (times_s[-1] - times_s[0])


def host_updates(memory: HostStates, quantity: str, dtypes: StateDtypes) -> Probe:
    """Return a probe of the work of a CPU_STEP of training, on the thread that touched ``memory`` first."""
    updates = Updates([_with_dtypes(tensors, dtypes, memory) for tensors in memory.sub_groups], memory.kernel)
    return lambda: {quantity: updates.params_per_s(memory.thread.submit(updates.step).result())}


def sufficient_threads(memory: HostStates, kernels: Mapping[int, AdamKernel]) -> Probe:
    """Return a probe of the fewest threads that reach ``FULL_RATE``. ``kernels`` update with the threads of their key.

    Memory bandwidth limits an update, so that more threads only take cores from other work.
    """
    updates = {threads: Updates(memory.sub_groups, kernel) for threads, kernel in kernels.items()}

    def repeat() -> Rates:
        rates = {
            threads: each.params_per_s(memory.thread.submit(each.step).result()) for threads, each in updates.items()
        }
        full_rate = FULL_RATE * max(rates.values())
        return {"cpu_adam_threads": float(min(threads for threads, rate in rates.items() if rate >= full_rate))}

    return repeat


def _with_dtypes(tensors: AdamTensors, dtypes: StateDtypes, memory: HostStates) -> AdamTensors:
    """Return the fp32 states as states with ``dtypes``, at the start of the same memory.

    Masters in the model's dtype are published themselves, unless the CPU writes the parameters of the model.
    """
    views = {name: getattr(tensors, name).view(dtype)[: tensors.grad.numel()] for name, dtype in dtypes.by_name.items()}
    is_published = memory.publishes and dtypes.master == tensors.grad.dtype
    return replace(tensors, **views, param=None if is_published else tensors.param)


def stock_updates(kernel: AdamKernel, memory: HostStates, device: Device[Any]) -> Probe:
    """Return a probe of stock's ``kernel`` on the caller's thread, with fp32 gradients that it scales in place."""
    in_fp32 = [replace(state, grad=device.empty_host(state.grad.numel(), torch.float32)) for state in memory.sub_groups]
    # Another product would leave the range of fp32.
    updates = Updates(in_fp32, kernel, grad_scales=(0.5, 2.0))
    return lambda: {"stock_cpu_adam_params_per_s": updates.params_per_s(updates.step())}


def host_updates_during_copies(device: Device[Any], memory: HostStates, directions: Sequence[Copies]) -> Probe:
    """Return a probe that updates on the CPU during copies both ways. It raises ``ProbeError`` without overlap."""
    updates = Updates(memory.sub_groups, memory.kernel)
    for _ in range(2):  # the first iteration warms up
        updated_s = memory.thread.submit(updates.step).result()
        origin_s = issue_copies(device, directions, 2)
        window_s(directions)
        pair_s = (time.perf_counter() - origin_s) / 2
    # The copies outlast an update, even if they slow it down to a third.
    count = 2 + int(3 * (updated_s[-1] - updated_s[0]) / pair_s)

    def repeat() -> Rates:
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

    The states of one launch are larger than the GPU's caches. If memory is short, each launch updates fewer parameters.
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
    """Return a probe of page-locked memory, which is multiplied in place and then copied."""
    memory = slab.tensor(0, slab.size_bytes // 4, torch.float32).fill_(1)
    half, other_half = memory.chunk(2)

    def repeat() -> Rates:
        start_s = time.perf_counter()
        # Denormal numbers would be slow.
        memory.mul_(-1.0)
        updated_s = time.perf_counter()
        half[: other_half.numel()].copy_(other_half)
        return {
            "dram_copy_bytes_per_s": 2 * other_half.nbytes / (time.perf_counter() - updated_s),
            "dram_update_bytes_per_s": 2 * memory.nbytes / (updated_s - start_s),
        }

    return repeat


def matrix_products(device: Device[Any], rows: int) -> Probe:
    """Return a probe of the FLOP/s of products of bf16 matrices of shape [rows, rows]."""
    # The timer uses the caller's stream, because cuBLAS keeps a workspace for every stream.
    timer = KernelTimer(device)
    # Training's random numbers must not depend on whether a profile was measured.
    generator = torch.Generator().manual_seed(0)
    left, right, product = (device.empty(rows * rows, torch.bfloat16).view(rows, rows) for _ in range(3))
    # Random, because a GPU needs less power for constants and runs faster.
    for matrix in (left, right):
        device.copy(matrix, torch.rand(rows, rows, generator=generator, dtype=torch.float32, device="cpu"))
    synchronize(device)
    multiply = partial(torch.mm, left, right, out=product)
    return lambda: {"matmul_flops_per_s": 2 * rows**3 / timer.seconds_of(multiply)}
