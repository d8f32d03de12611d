"""Test the memory of the probes: it is allocated, touched and locked as in training, and all of it is freed."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.cuda import CudaDevice
from deep_opt_states.device.kernels.adam import AdamTensors, ElementRange
from deep_opt_states.device.slab import HostMemoryError, HostSlab
from deep_opt_states.host import machine
from deep_opt_states.profiler.probes import SUB_GROUPS, HostStates
from deep_opt_states.profiler.profile import measure, training_cpu_adam
from deep_opt_states.profiler.ranks import Ranks
from perf_model.prediction.hardware import HardwareProfile, ProfileError
from tests.profiler.test_profile import COPY_LATENCY_S, KERNEL_S, LAUNCH_S, PRODUCT_S, SMALL, TICK_S, UPDATE_S
from tests.profiler.virtual import LaunchedAdam, TimedAdam, VirtualDevice, kernels, virtual_clock

NUMEL = SUB_GROUPS * 10_000


@pytest.fixture(autouse=True)
def _no_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "last_level_cache_bytes", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr(machine, "core_quota", lambda folders: None)


@pytest.fixture
def device() -> Iterator[VirtualDevice]:
    with virtual_clock(
        VirtualDevice(issue_s=COPY_LATENCY_S), tick_s=TICK_S, launch_s=LAUNCH_S, product_s=PRODUCT_S
    ) as device:
        yield device


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """Disable the garbage collector, so that memory in a cycle of references is not freed."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class WatchedTimedAdam(TimedAdam):
    """A kernel that records its addresses and threads, and that fails at its ``fails_at``-th update."""

    def __init__(self, device: VirtualDevice, fails_at: int | None = None) -> None:
        super().__init__(device, UPDATE_S - TICK_S)
        self.zeroed: list[tuple[int, int]] = []
        self.locked_before_zeroed = False
        self.outside = 0
        self.threads: set[int] = set()
        self.updates = 0
        self._fails_at = fails_at

    def zero(self, tensors: AdamTensors) -> None:
        super().zero(tensors)
        self.threads.add(threading.get_ident())
        self.locked_before_zeroed |= bool(self._device.registered)
        self.zeroed += [(tensor.data_ptr(), tensor.nbytes) for tensor in vars(tensors).values()]

    def update(self, sub_group: int, tensors: AdamTensors, element_range: ElementRange | None = None) -> None:
        self.updates += 1
        if self.updates == self._fails_at:
            raise MemoryError("broken on purpose")
        super().update(sub_group, tensors, element_range)
        self.threads.add(threading.get_ident())
        ((address, size_bytes),) = self._device.registered
        for tensor in vars(tensors).values():
            self.outside += not address <= tensor.data_ptr() <= address + size_bytes - tensor.nbytes


def profile_of(
    device: VirtualDevice, kernel: TimedAdam, cores: Sequence[int] = (), **factories: Any
) -> HardwareProfile:
    with kernels(
        **{
            "training_cpu_adam": lambda *_: kernel,
            "stock_cpu_adam": lambda _: TimedAdam(device, UPDATE_S - TICK_S),
            "training_gpu_adam": lambda: LaunchedAdam(device, launch_s=LAUNCH_S, kernel_s=KERNEL_S),
            **factories,
        }
    ):
        return measure(device, Ranks(), SMALL, threads=3, cores=cores)


def test_cpu_probes_use_a_slab_that_their_kernel_touched_before_it_was_locked(
    device: VirtualDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = WatchedTimedAdam(device)
    slabs: list[tuple[int, bool]] = []
    register, empty_host = device._register, device.empty_host
    pinned: set[int] = set()

    def watched_register(address: int, size_bytes: int) -> Any:
        slabs.append((size_bytes, pages_in_place(address, size_bytes)))
        return register(address, size_bytes)

    def watched_empty_host(numel: int, dtype: torch.dtype) -> torch.Tensor:
        pinned.add(numel * dtype.itemsize)
        return empty_host(numel, dtype)

    monkeypatch.setattr(device, "_register", watched_register)
    monkeypatch.setattr(device, "empty_host", watched_empty_host)
    profile_of(device, kernel)
    (slab_bytes, were_in_place) = slabs[0]
    assert len(slabs) == 1
    assert were_in_place
    assert not kernel.locked_before_zeroed
    # The padding between the tensors is shorter than a cache line.
    zeroed_bytes = sum(nbytes for _, nbytes in kernel.zeroed)
    assert zeroed_bytes == 16 * NUMEL <= slab_bytes < 16 * NUMEL + len(kernel.zeroed) * 64
    assert kernel.updates > SUB_GROUPS
    assert kernel.outside == 0
    # All other pinned memory is for copies and for stock's gradients: the bandwidth probes allocate none.
    assert pinned == {SMALL.copy_bytes, 1024, 4 * NUMEL // SUB_GROUPS}


def pages_in_place(address: int, size_bytes: int) -> bool:
    pages = (ctypes.c_ubyte * -(-size_bytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), pages) == 0
    return all(page & 1 for page in pages)


def test_the_threads_that_touched_the_memory_first_update_it(device: VirtualDevice) -> None:
    kernel = WatchedTimedAdam(device)
    profile_of(device, kernel)
    assert kernel.updates > SUB_GROUPS
    assert len(kernel.threads) == 1
    assert threading.get_ident() not in kernel.threads


def test_threads_are_pinned_as_in_training(device: VirtualDevice) -> None:
    made: list[tuple[int, tuple[int, ...]]] = []

    def cpu_adam(num_sub_groups: int, threads: int, cores: Sequence[int]) -> TimedAdam:
        made.append((threads, tuple(cores)))
        return TimedAdam(device, UPDATE_S - TICK_S)

    profile_of(device, TimedAdam(device, UPDATE_S - TICK_S), cores=(5, 1, 3), training_cpu_adam=cpu_adam)
    assert made == [(3, (5, 1, 3))]


def test_the_thread_that_measures_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    allowed = os.sched_getaffinity(0)
    core = max(allowed)
    states = HostStates(HostDevice(), NUMEL, training_cpu_adam(SUB_GROUPS, 1, (core,)))
    assert states.thread.submit(os.sched_getaffinity, 0).result() == {core}
    assert os.sched_getaffinity(0) == allowed
    states.close()


@pytest.mark.usefixtures("_no_collector")
def test_all_memory_is_freed(device: VirtualDevice) -> None:
    threads = threading.active_count()
    profile = profile_of(device, TimedAdam(device, UPDATE_S - TICK_S))
    assert profile.get("gpu_adam_params_per_s") is not None
    assert profile.get("cpu_adam_beside_transfers_params_per_s") is not None
    assert device.most_held_bytes > 16 * NUMEL
    assert device.held_bytes == 0
    assert device.registered == []
    assert threading.active_count() == threads


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("fails_at", [1, 3 * SUB_GROUPS])
def test_all_memory_is_freed_while_the_error_of_a_probe_is_handled(device: VirtualDevice, fails_at: int) -> None:
    with pytest.raises(ProfileError, match="MemoryError: broken on purpose") as caught:
        profile_of(device, WatchedTimedAdam(device, fails_at))
    assert caught.value.__traceback__ is not None
    assert device.held_bytes == 0
    assert device.registered == []


@pytest.mark.usefixtures("_no_collector")
def test_all_memory_is_freed_if_the_accelerator_fails(device: VirtualDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    class FailingLaunchedAdam(LaunchedAdam):
        def update(self, *arguments: Any) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    profile = profile_of(
        device,
        TimedAdam(device, UPDATE_S - TICK_S),
        training_gpu_adam=lambda: FailingLaunchedAdam(device, launch_s=0, kernel_s=0),
    )
    waived = profile.measurements["gpu_adam_params_per_s"].waived
    assert waived == "RuntimeError: an illegal memory access was encountered"
    assert device.held_bytes == 0


def test_memory_that_cannot_be_locked_is_reported_with_the_remedy(
    device: VirtualDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: int, size_bytes: int) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(device, "_register", refuse)
    with pytest.raises(ProfileError, match=r"must be page-locked, .*: CUDA error: out of memory\. Raise the memlock"):
        profile_of(device, TimedAdam(device, UPDATE_S - TICK_S))
    assert device.held_bytes == 0


def test_states_that_cannot_be_locked_are_freed() -> None:
    closed: list[HostSlab] = []

    class Slab(HostSlab):
        def lock(self) -> None:
            raise HostMemoryError("refused")

        def close(self) -> None:
            closed.append(self)
            super().close()

    class Refusing(HostDevice):
        def host_slab(self, size_bytes: int) -> HostSlab:
            return Slab(size_bytes)

    threads = threading.active_count()
    with pytest.raises(HostMemoryError, match="refused"):
        HostStates(Refusing(), NUMEL, TimedAdam(VirtualDevice(), 0))
    assert len(closed) == 1
    # Threads of earlier tests may end in between.
    assert threading.active_count() <= threads


def test_cuda_releases_both_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check both calls, since no public function frees the pinned cache in every supported version of PyTorch."""
    released: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append("accelerator"))
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: released.append("page-locked"), raising=False)
    CudaDevice(0).release_cached()
    assert released == ["accelerator", "page-locked"]
