"""The host memory that states lie in."""

from __future__ import annotations

import errno
import mmap
import os
import re
from collections.abc import Callable

import pytest
import torch

from deep_opt_states.device.slab import HUGE_PAGE_BYTES, HostMemoryError, HostSlab


def fail_with(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def test_huge_pages_are_asked_for_where_one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Asked(mmap.mmap):
        def madvise(self, *args: int) -> None:
            asked.append((len(self), args))

    monkeypatch.setattr(mmap, "mmap", Asked)
    for size_bytes in (HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES):
        HostSlab(size_bytes)
    assert asked == [(size_bytes, (mmap.MADV_HUGEPAGE,)) for size_bytes in (HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES)]


def test_a_kernel_without_huge_pages_gives_memory_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutHugePages(mmap.mmap):
        def madvise(self, *args: int) -> None:
            raise fail_with(errno.EINVAL)

    monkeypatch.setattr(mmap, "mmap", WithoutHugePages)
    slab = HostSlab(HUGE_PAGE_BYTES)
    assert not slab.tensor(0, HUGE_PAGE_BYTES, torch.uint8).any()


def test_memory_that_the_system_refuses_is_told_with_the_remedy() -> None:
    with pytest.raises(HostMemoryError) as caught:
        HostSlab(2**50)  # more than there are addresses
    assert str(caught.value) == (
        "A rank's host memory must be within what the system lets a process map; found 1.13e+06 GB refused: "
        "Cannot allocate memory.\n"
        "Raise ulimit -v, or vm.overcommit_ratio where vm.overcommit_memory is 2, or train on more ranks."
    )


def test_another_failure_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def mapped(*args: object, **kwargs: object) -> mmap.mmap:
        raise fail_with(errno.EPERM)

    monkeypatch.setattr(mmap, "mmap", mapped)
    with pytest.raises(PermissionError, match=re.escape(os.strerror(errno.EPERM))):
        HostSlab(HUGE_PAGE_BYTES)


def test_the_whole_slab_is_locked_when_it_is_asked_for_and_until_it_is_closed() -> None:
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


def test_a_lock_that_the_driver_refuses_is_told_with_the_remedy() -> None:
    def refuse(address: int, size_bytes: int) -> Callable[[], object]:
        raise RuntimeError("CUDA error: out of memory")

    slab = HostSlab(2 * 10**6, refuse)
    with pytest.raises(HostMemoryError) as caught:
        slab.lock()
    assert str(caught.value) == (
        "A rank's host memory must be page-locked, so that transfers overlap; found 0.002 GB refused: "
        "CUDA error: out of memory.\n"
        "Raise the memlock limit (ulimit -l unlimited; of a container --ulimit memlock=-1), or train on more ranks."
    )
    slab.close()
