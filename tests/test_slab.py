"""The host memory that states lie in."""

from __future__ import annotations

import errno
import mmap
import os
import re

import pytest
import torch

from deep_opt_states.device.slab import HUGE_PAGE_BYTES, HostMemoryError, HostSlab


def fail_with(code: int) -> OSError:
    return OSError(code, os.strerror(code))


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
