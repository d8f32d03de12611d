"""Check page-locked memory: pinned tensors, registered ranges, and the limits of a forked child."""

from __future__ import annotations

import ctypes
import gc
import mmap
import signal
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from tests.forked_child import exit_code_of_child, protection_of
from tests.software_gpu import device
from tests.software_gpu.library import DEVICE_TYPE
from tests.software_gpu.settings import changed

NUMEL = 100_000
"""More than the bytes that are staged."""

ALREADY_MAPPED, NOT_REGISTERED, OUT_OF_MEMORY, INVALID = 712, 713, 2, 1


def _mapped() -> tuple[torch.Tensor, int]:
    """Return a tensor over pages of its own, and their address."""
    pages = mmap.mmap(-1, NUMEL * 4)
    tensor = torch.frombuffer(pages, dtype=torch.float32)
    return tensor.fill_(1), tensor.data_ptr()


def pinned_tensors_are_recognized() -> None:
    made, moved = torch.empty(NUMEL, pin_memory=True), torch.ones(NUMEL).pin_memory()
    assert made.is_pinned()
    assert moved.is_pinned()
    assert moved[NUMEL // 2 :].is_pinned()
    assert moved.tolist() == [1] * NUMEL
    assert not torch.empty(NUMEL).is_pinned()
    assert not torch.empty(NUMEL, device=DEVICE_TYPE).is_pinned()


def pinned_memory_that_was_never_written_is_nan() -> None:
    torch.ones(NUMEL).pin_memory()
    assert torch.empty(NUMEL, pin_memory=True).isnan().all()


def a_pinned_tensor_is_kept_until_it_is_copied() -> None:
    with changed(lazy=True, lazy_s=100.0):
        target = torch.empty(NUMEL, device=DEVICE_TYPE)
        source = torch.ones(NUMEL).pin_memory()
        address = source.data_ptr()
        target.copy_(source, non_blocking=True)
        del source
        second = torch.zeros(NUMEL).pin_memory()
        assert second.data_ptr() != address
        assert target.tolist() == [1] * NUMEL
        # The copy is over now.
        assert torch.empty(NUMEL, pin_memory=True).data_ptr() == address


def unused_page_locked_memory_is_returned() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    large = torch.zeros(64 * 2**20, dtype=torch.uint8, pin_memory=True)
    with_it = resident_bytes()
    del large
    device.empty_host_cache()
    assert with_it - resident_bytes() > 60 * 2**20


def registered_memory_is_page_locked_until_it_is_unregistered() -> None:
    tensor, address = _mapped()
    runtime = device.cudart()
    assert not tensor.is_pinned()
    assert runtime.cudaHostRegister(address, NUMEL * 4, 0) == 0
    assert tensor.is_pinned()
    assert tensor[10:].is_pinned()
    assert runtime.cudaHostUnregister(address) == 0
    assert not tensor.is_pinned()


def wrong_registrations_have_the_errors_of_cuda() -> None:
    tensor, address = _mapped()
    runtime = device.cudart()
    assert runtime.cudaHostRegister(address, 0, 0) == INVALID
    assert runtime.cudaHostUnregister(address) == NOT_REGISTERED
    assert runtime.cudaHostRegister(address, NUMEL * 4, 0) == 0
    assert runtime.cudaHostRegister(address, NUMEL * 4, 0) == ALREADY_MAPPED
    assert runtime.cudaHostRegister(address + 8192, 4096, 0) == ALREADY_MAPPED
    assert runtime.cudaHostUnregister(address + 8192) == NOT_REGISTERED
    with pytest.raises(device.CudaError, match=r"error 712: .* already mapped"):
        device.check_error(runtime.cudaHostRegister(address, 4096, 0))
    assert runtime.cudaHostUnregister(address) == 0
    with changed(page_lock_limit_bytes=NUMEL * 4 - 1):
        assert runtime.cudaHostRegister(address, NUMEL * 4, 0) == OUT_OF_MEMORY
        with pytest.raises(device.CudaError, match="error 2: out of memory"):
            device.check_error(OUT_OF_MEMORY)
    device.check_error(0)
    assert tensor[0] == 1


def memory_that_is_unregistered_while_it_is_copied_is_an_error() -> None:
    tensor, address = _mapped()
    on_device = torch.ones(NUMEL, device=DEVICE_TYPE)
    for target, source in ((on_device, tensor), (tensor, on_device)):
        with changed(lazy=True, lazy_s=100.0):
            assert device.cudart().cudaHostRegister(address, NUMEL * 4, 0) == 0
            target.copy_(source, non_blocking=True)
            assert device.cudart().cudaHostUnregister(address) == 0
            with pytest.raises(RuntimeError, match="unregistered while a copy from or to it was in flight"):
                device.synchronize()
            assert device.take_error() != ""


def _expect_refusals() -> int:
    """Return 0, the exit code, if the device refuses every use."""
    for use in (
        lambda: torch.empty(1, device=DEVICE_TYPE),
        lambda: torch.empty(1, pin_memory=True),
        device.Stream,
        device.synchronize,
        device.memory_stats,
    ):
        with pytest.raises(RuntimeError, match="Cannot re-initialize the software GPU in forked subprocess"):
            use()
    assert device._is_in_bad_fork()
    assert not device.is_initialized()
    return 0


_held: list[torch.Tensor] = []


def _collect() -> int:
    """Collect the tensors, and return 0, the exit code."""
    # A process that found a lock taken would wait for ever; its alarm ends it.
    signal.alarm(60)
    _held.clear()
    gc.collect()
    return 0


def a_forked_child_cannot_use_the_device_and_its_parent_can() -> None:
    _held[:] = [torch.ones(10, device=DEVICE_TYPE), torch.ones(10).pin_memory()]
    assert exit_code_of_child(_expect_refusals) == 0
    assert not device._is_in_bad_fork()
    assert device.is_initialized()
    assert (_held[0] * 2).tolist() == [2] * 10


def a_child_forked_at_any_time_can_collect_its_tensors_and_end() -> None:
    """Fork while streams execute, allocate and free, and so while their threads hold locks."""
    _held[:] = [torch.ones(10, device=DEVICE_TYPE), torch.ones(10).pin_memory()]
    for _ in range(15):
        for _ in range(50):
            _held[0].add_(torch.ones(10).pin_memory().to(DEVICE_TYPE, non_blocking=True))
        assert exit_code_of_child(_collect) == 0
    assert _held[0].tolist() == [751] * 10
    assert gc.isenabled()


def forked_data_loaders_work_beside_the_device() -> None:
    loader = DataLoader(torch.arange(40.0).tolist(), batch_size=4, num_workers=2, pin_memory=True)
    total = torch.zeros((), device=DEVICE_TYPE, dtype=torch.float64)
    for batch in loader:
        assert batch.is_pinned()
        total += batch.to(DEVICE_TYPE, non_blocking=True).sum()
    assert total.item() == sum(range(40))


def memory_of_the_device_cannot_be_read_through_its_address() -> None:
    """Check that the pages of a tensor allow no access, without ending the process as an access would."""
    tensor = torch.ones(10, device=DEVICE_TYPE)
    address = tensor.data_ptr()
    assert protection_of(address).startswith("---")
    device.synchronize()
    # Other threads find the bytes elsewhere.
    assert ctypes.c_float.from_address(device.real_address(address)).value == 1
