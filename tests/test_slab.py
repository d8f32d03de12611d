"""Check the slab of host memory that holds the states, and CUDA's page-locking of it, against a simulated runtime."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from deep_opt_states.device import slab as slab_module
from deep_opt_states.device.cuda import CudaDevice
from deep_opt_states.device.slab import HUGE_PAGE_BYTES, HostMemoryError, HostSlab
from tests.forked_child import exit_code_of_child, is_mapped
from tests.launch import REPOSITORY


def test_huge_pages_are_requested_if_one_fits_and_a_kernel_may_refuse_them(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []

    def madvise(mapping: mmap.mmap, advice: int) -> None:
        if advice == mmap.MADV_HUGEPAGE:
            requested.append(len(mapping))
            raise OSError(errno.EINVAL, "the kernel has no huge pages")

    monkeypatch.setattr(slab_module.HostMapping, "madvise", madvise)
    slabs = [HostSlab(size_bytes) for size_bytes in (HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES)]
    assert requested == [HUGE_PAGE_BYTES]
    assert not slabs[1].tensor(0, HUGE_PAGE_BYTES, torch.uint8).any()


@pytest.mark.P6
def test_memory_that_the_system_or_the_driver_refuses_is_reported_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(address: int, size_bytes: int) -> Callable[[], object]:
        raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(HostMemoryError) as caught:
        HostSlab(2**50)  # more than there are addresses
    assert str(caught.value) == (
        "A rank's host memory must be within what the system lets a process map; found 1.13e+06 GB refused: "
        "Cannot allocate memory.\n"
        "Raise ulimit -v, or vm.overcommit_ratio where vm.overcommit_memory is 2, or train on more ranks."
    )
    with pytest.raises(HostMemoryError) as caught:
        HostSlab(2 * 10**6, refuse).lock()
    assert str(caught.value) == (
        "A rank's host memory must be page-locked, so that transfers overlap; found 0.002 GB refused: "
        "CUDA error: out of memory.\n"
        "Raise the memlock limit (ulimit -l unlimited; for a container --ulimit memlock=-1), or train on more ranks."
    )

    def not_permitted(*args: object, **kwargs: object) -> mmap.mmap:
        raise OSError(errno.EPERM, "not permitted")

    monkeypatch.setattr(slab_module, "HostMapping", not_permitted)
    with pytest.raises(PermissionError, match="not permitted"):
        HostSlab(HUGE_PAGE_BYTES)


@pytest.mark.parametrize("size_bytes", [1, mmap.PAGESIZE + 1, HUGE_PAGE_BYTES + 1])
def test_a_forked_child_does_not_inherit_the_slab(size_bytes: int) -> None:
    """Check it because the parent's next write would move a page, while the accelerator copies from the old one."""
    whole = HostSlab(size_bytes).tensor(0, size_bytes, torch.uint8).fill_(7)
    first, last = whole.data_ptr(), whole[-1:].data_ptr()
    assert is_mapped(first)
    assert is_mapped(last)
    assert exit_code_of_child(lambda: is_mapped(first) + 2 * is_mapped(last)) == 0
    assert whole.eq(7).all()


def test_a_forked_child_that_drops_the_slab_unmaps_nothing_of_its_own() -> None:
    """Check it because the addresses are free in the child, so the child's next mapping may have them."""
    unregistered_by: list[int] = []
    slab = HostSlab(16 * mmap.PAGESIZE, lambda address, size_bytes: lambda: unregistered_by.append(os.getpid()))
    tensor = slab.tensor(0, 16 * mmap.PAGESIZE, torch.uint8)
    slab.lock()
    address = tensor.data_ptr()
    held: list[object] = [slab, tensor]
    del slab, tensor

    def drop() -> int:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        private, anonymous, at_this_address = mmap.MAP_PRIVATE, mmap.MAP_ANONYMOUS, 0x100000
        where, size = ctypes.c_void_p(address), ctypes.c_size_t(16 * mmap.PAGESIZE)
        kind = private | anonymous | at_this_address
        taken = libc.mmap(where, size, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, ctypes.c_long(0))
        if taken != address:
            return 1
        held.clear()
        gc.collect()
        if unregistered_by:
            return 2
        return 0 if is_mapped(address) else 3

    assert exit_code_of_child(drop) == 0
    held.clear()
    assert unregistered_by == [os.getpid()]


def test_nothing_is_unregistered_when_a_forked_child_or_the_interpreter_ends() -> None:
    """Check it because the driver may be gone by the end of the interpreter, and the system takes the pages back."""
    code = (
        "import os, sys, torch\n"
        "from deep_opt_states.device.slab import HostSlab\n"
        "closed, left = (HostSlab(1 << 22, lambda *_: lambda: print('unregistered')) for _ in range(2))\n"
        "tensors = [slab.tensor(0, 1 << 22, torch.uint8).fill_(7) for slab in (closed, left)]\n"
        "closed.lock()\nleft.lock()\nos.fork() or sys.exit(0)\nos.wait()\nclosed.close()\n"
        "print(*(int(tensor.sum()) for tensor in tensors))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"unregistered\n{7 << 22} {7 << 22}\n", "")


LARGE_BYTES = 32 * HUGE_PAGE_BYTES
"""A size at which the first address is not mapped again right after it is unmapped, though the last may be."""


@pytest.mark.parametrize("is_closed", [False, True])
def test_memory_without_references_is_unregistered_once_and_then_unmapped(is_closed: bool) -> None:
    registered: list[tuple[int, int]] = []
    mapped_when_unregistered: list[bool] = []

    def register(address: int, size_bytes: int) -> Callable[[], object]:
        registered.append((address, size_bytes))
        return lambda: mapped_when_unregistered.append(is_mapped(address))

    slab = HostSlab(LARGE_BYTES, register)
    first, second = slab.tensor(0, 8, torch.uint8), slab.tensor(8, 8, torch.uint8)
    slab.lock()
    assert registered == [(first.data_ptr(), LARGE_BYTES)]
    if is_closed:
        slab.close()
        slab.close()
    cycle: list[object] = [slab]
    cycle.append(cycle)
    del slab, cycle
    gc.collect()
    del first
    second.fill_(7)
    assert mapped_when_unregistered == [True] * is_closed, "a tensor over the memory is left, and may still be copied"
    assert is_mapped(registered[0][0])
    del second
    assert mapped_when_unregistered == [True]
    assert not is_mapped(registered[0][0])


class RefusedByCuda(RuntimeError):
    """The error of a simulated call."""


def simulate_cuda(patch: pytest.MonkeyPatch, *, register: int = 0, unregister: int = 0) -> mock.MagicMock:
    """Replace CUDA, of which two calls return these codes. A launch, here ``ones``, raises the last error."""

    def check_error(code: int) -> None:
        if code != 0:
            raise RefusedByCuda(f"refused ({code})")

    cuda = mock.MagicMock(CudaError=RefusedByCuda, check_error=check_error)
    cuda.cudart.return_value = mock.Mock(**{"cudaHostRegister.return_value": register})
    cuda.cudart.return_value.cudaHostUnregister.return_value = unregister
    cuda.ones.side_effect = RefusedByCuda
    patch.setattr(torch, "cuda", cuda)
    patch.setattr(torch, "ones", cuda.ones)
    return cuda


def calls_of(cuda: mock.MagicMock) -> list[str]:
    return [name.rpartition(".")[2] for name, *_ in cuda.mock_calls if name != "cudart"]


def test_a_refused_lock_or_unlock_leaves_no_error_for_the_next_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check it because the next launch may be the collective in which the ranks agree on the error."""
    cuda = simulate_cuda(monkeypatch, register=2)
    with pytest.raises(HostMemoryError, match=r"refused: refused \(2\)"):
        CudaDevice(3).host_slab(1000).lock()
    assert calls_of(cuda) == ["cudaHostRegister", "ones"]
    cuda = simulate_cuda(monkeypatch, unregister=713)
    slab = CudaDevice(3).host_slab(1000)
    slab.lock()
    with pytest.raises(RefusedByCuda, match="713"):
        slab.close()
    assert calls_of(cuda)[-3:] == ["cudaHostUnregister", "ones", "__exit__"]


def test_memory_is_unregistered_on_its_device_once_nothing_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check it on a thread whose current device is another one, such as a thread that collects garbage."""
    cuda, device = simulate_cuda(monkeypatch), CudaDevice(3)
    slab = device.host_slab(1000)
    slab.lock()
    slab.close()
    assert calls_of(cuda) == [
        *("cudaHostRegister", "device", "__enter__", "synchronize", "cudaHostUnregister", "__exit__"),
    ]
    device.enter_thread()
    device.event()
    gpu = torch.device("cuda", 3)
    assert cuda.mock_calls[-2:] == [mock.call.set_device(gpu), mock.call.Event(enable_timing=True, blocking=True)]
    cuda.device.assert_called_once_with(gpu)
