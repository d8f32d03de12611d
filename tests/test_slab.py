"""Check the slab of host memory that holds the states."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from deep_opt_states.device import slab as slab_module
from deep_opt_states.device.slab import HUGE_PAGE_BYTES, HostMemoryError, HostSlab
from tests.forked_child import exit_code_of_child, is_mapped
from tests.launch import REPOSITORY


def fail_with(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def test_huge_pages_are_requested_if_one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def madvise(mapping: mmap.mmap, advice: int) -> None:
        calls.append((len(mapping), advice))

    monkeypatch.setattr(slab_module.HostMapping, "madvise", madvise)
    for size_bytes in (HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES):
        HostSlab(size_bytes)
    huge = [(size_bytes, mmap.MADV_HUGEPAGE) for size_bytes in (HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES)]
    assert [call for call in calls if call[1] == mmap.MADV_HUGEPAGE] == huge


def test_slab_is_allocated_by_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def madvise(mapping: mmap.mmap, advice: int) -> None:
        if advice == mmap.MADV_HUGEPAGE:
            raise fail_with(errno.EINVAL)

    monkeypatch.setattr(slab_module.HostMapping, "madvise", madvise)
    slab = HostSlab(HUGE_PAGE_BYTES)
    assert not slab.tensor(0, HUGE_PAGE_BYTES, torch.uint8).any()


def test_memory_that_the_system_refuses_is_reported_with_the_remedy() -> None:
    with pytest.raises(HostMemoryError) as caught:
        HostSlab(2**50)  # more than there are addresses
    assert str(caught.value) == (
        "A rank's host memory must be within what the system lets a process map; found 1.13e+06 GB refused: "
        "Cannot allocate memory.\n"
        "Raise ulimit -v, or vm.overcommit_ratio where vm.overcommit_memory is 2, or train on more ranks."
    )


def test_other_errors_are_raised_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def mapped(*args: object, **kwargs: object) -> mmap.mmap:
        raise fail_with(errno.EPERM)

    monkeypatch.setattr(slab_module, "HostMapping", mapped)
    with pytest.raises(PermissionError, match=re.escape(os.strerror(errno.EPERM))):
        HostSlab(HUGE_PAGE_BYTES)


def test_whole_slab_is_locked_from_lock_until_close() -> None:
    calls: list[object] = []

    def register(address: int, size_bytes: int) -> Callable[[], object]:
        calls.append((address, size_bytes))
        return lambda: calls.append("undone")

    slab = HostSlab(1000, register)
    assert calls == []
    slab.lock()
    assert calls == [(slab.tensor(0, 1000, torch.uint8).data_ptr(), 1000)]
    slab.close()
    slab.close()
    assert calls[1:] == ["undone"]


def test_lock_that_the_driver_refuses_is_reported_with_the_remedy() -> None:
    def refuse(address: int, size_bytes: int) -> Callable[[], object]:
        raise RuntimeError("CUDA error: out of memory")

    slab = HostSlab(2 * 10**6, refuse)
    with pytest.raises(HostMemoryError) as caught:
        slab.lock()
    assert str(caught.value) == (
        "A rank's host memory must be page-locked, so that transfers overlap; found 0.002 GB refused: "
        "CUDA error: out of memory.\n"
        "Raise the memlock limit (ulimit -l unlimited; for a container --ulimit memlock=-1), or train on more ranks."
    )
    slab.close()


@pytest.mark.parametrize("size_bytes", [1, mmap.PAGESIZE + 1, HUGE_PAGE_BYTES + 1])
def test_a_forked_child_does_not_inherit_the_slab(size_bytes: int) -> None:
    """Check it because the parent's next write would move a page, while the accelerator copies from the old one."""
    slab = HostSlab(size_bytes)
    whole = slab.tensor(0, size_bytes, torch.uint8).fill_(7)
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
        taken = libc.mmap(
            ctypes.c_void_p(address),
            ctypes.c_size_t(16 * mmap.PAGESIZE),
            mmap.PROT_READ | mmap.PROT_WRITE,
            private | anonymous | at_this_address,
            -1,
            ctypes.c_long(0),
        )
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


@pytest.mark.parametrize("ending", ["sys.exit(0)", "os._exit(0)"])
def test_a_forked_child_that_holds_the_slab_ends_normally(ending: str) -> None:
    code = (
        "import os, sys, torch\n"
        "from deep_opt_states.device.slab import HostSlab\n"
        "slab = HostSlab(1 << 22, lambda address, size_bytes: lambda: print('unregistered', os.getpid()))\n"
        "tensor = slab.tensor(0, 1 << 22, torch.uint8).fill_(7)\n"
        "slab.lock()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        f"    {ending}\n"
        "_, status = os.waitpid(child, 0)\n"
        "slab.close()\n"
        "print(os.getpid(), os.waitstatus_to_exitcode(status), int(tensor.sum()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    parent, exit_code, total = done.stdout.split()[-3:]
    assert done.stdout.splitlines() == [f"unregistered {parent}", f"{parent} 0 {7 << 22}"], done.stderr
    assert (exit_code, total) == ("0", str(7 << 22))


LARGE_BYTES = 32 * HUGE_PAGE_BYTES
"""A size at which the first address is not mapped again at once after it is unmapped, though the last may be."""


class Registered:
    """A driver that records whether the memory is still mapped when it is unregistered."""

    def __init__(self) -> None:
        self.mapped_when_unregistered: list[bool] = []
        self.address = 0

    def register(self, address: int, size_bytes: int) -> Callable[[], object]:
        self.address = address
        return lambda: self.mapped_when_unregistered.append(is_mapped(address))


def test_memory_without_references_is_unregistered_and_then_unmapped() -> None:
    driver = Registered()
    slab = HostSlab(LARGE_BYTES, driver.register)
    first, second = slab.tensor(0, 8, torch.uint8), slab.tensor(8, 8, torch.uint8)
    slab.lock()
    del slab
    gc.collect()
    del first
    second.fill_(7)
    assert driver.mapped_when_unregistered == [], "a tensor over the memory is left, and may still be copied"
    assert is_mapped(driver.address)
    del second
    assert driver.mapped_when_unregistered == [True]
    assert not is_mapped(driver.address)


def test_memory_in_a_cycle_of_garbage_is_unregistered_and_then_unmapped() -> None:
    driver = Registered()
    slab = HostSlab(LARGE_BYTES, driver.register)
    slab.lock()
    cycle: list[object] = [slab]
    cycle.append(cycle)
    del slab, cycle
    gc.collect()
    assert driver.mapped_when_unregistered == [True]
    assert not is_mapped(driver.address)


def test_memory_that_was_closed_is_unregistered_once() -> None:
    driver = Registered()
    slab = HostSlab(LARGE_BYTES, driver.register)
    tensor = slab.tensor(0, 8, torch.uint8)
    slab.lock()
    slab.close()
    assert driver.mapped_when_unregistered == [True]
    tensor.fill_(7)
    del slab, tensor
    gc.collect()
    assert driver.mapped_when_unregistered == [True]
    assert not is_mapped(driver.address)


def test_nothing_is_unregistered_when_the_interpreter_shuts_down() -> None:
    """Check it because the driver may be gone by then, and the system takes the pages back."""
    code = (
        "import torch\n"
        "from deep_opt_states.device.slab import HostSlab\n"
        "slab = HostSlab(1 << 22, lambda address, size_bytes: lambda: print('unregistered'))\n"
        "tensor = slab.tensor(0, 1 << 22, torch.uint8)\n"
        "slab.lock()\n"
        "print('end')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
