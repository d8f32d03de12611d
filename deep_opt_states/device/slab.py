"""Allocate host memory once, page-lock it once, and lay tensors over it that each have their own storage."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import TypeAlias

import torch

HUGE_PAGE_BYTES = 2 * 2**20

Register: TypeAlias = Callable[[int, int], Callable[[], object]]
"""A function that page-locks (address, bytes), and returns one that waits for copies and undoes it, on any thread."""

LOCK_REMEDY = (
    "Raise the memlock limit (ulimit -l unlimited; for a container --ulimit memlock=-1), or train on more ranks."
)


class HostMemoryError(RuntimeError):
    """The error for a host that does not have enough memory for the states, or may not provide it."""


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
"""Flags that Python's ``mmap`` lacks: replace a mapping, and let a slab be larger than memory, as files back a part."""


class HostMapping(mmap.mmap):
    """Anonymous memory of this process that is unregistered before it is unmapped.

    The last reference of the slab or a tensor does so. A ``weakref.finalize`` would run after ``mmap`` has unmapped.
    """

    registered: list[Callable[[], object]] | None = None
    """A function per registered part that unregisters it. ``__del__`` also runs if ``mmap`` has failed."""

    def unregister(self) -> None:
        while self.registered:
            self.registered.pop()()

    def __del__(self) -> None:
        # During shutdown the driver may be gone.
        if not sys.is_finalizing():
            self.unregister()


_mappings: weakref.WeakSet[HostMapping] = weakref.WeakSet()


def _keep_mappings_in_forked_child() -> None:
    """Keep a forked child from unmapping addresses at which it may have mapped other memory."""
    # With one more reference they are never finalized, even when the interpreter shuts down.
    for mapping in _mappings:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))


os.register_at_fork(after_in_child=_keep_mappings_in_forked_child)


class HostSlab:
    """Host memory of ``size_bytes`` zero bytes, which is pageable until ``lock`` page-locks it with ``register``.

    First touch places a page on the NUMA node of the touching thread. A forked child does not inherit the pages, and
    ends by SIGSEGV if it uses them. Raise ``HostMemoryError`` if the system refuses the memory.
    """

    def __init__(self, size_bytes: int, register: Register | None = None) -> None:
        self.size_bytes = size_bytes
        self._register = register
        self._memory = _map(size_bytes) if size_bytes > 0 else None
        self.host_bytes = size_bytes
        """The bytes that are not mapped from files."""
        self._mapped: list[tuple[int, int]] = []
        """The begin and end, in bytes, of each part that is mapped from a file."""

    def tensor(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of shape [numel] over the slab's bytes from ``offset_bytes`` on, which keeps them alive."""
        assert self._memory is not None
        # Each tensor has its own storage, because ``torch.save`` writes whole storages, even for a view.
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=offset_bytes)

    def bytes(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Return ``size_bytes`` of the memory from ``offset_bytes`` on."""
        assert self._memory is not None
        return memoryview(self._memory)[offset_bytes : offset_bytes + size_bytes]

    def map_file(self, fd: int, offset_bytes: int, size_bytes: int) -> None:
        """Replace whole pages by the same pages of the file ``fd``, which are not locked. Raise ``HostMemoryError``."""
        assert self._memory is not None
        address, flags = self._address + offset_bytes, mmap.MAP_SHARED | _MAP_FIXED
        found = _libc.mmap(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset_bytes)
        if found != address:
            raise HostMemoryError(
                f"States on disk must be mapped into memory part by part, found {size_bytes} bytes refused: "
                f"{os.strerror(ctypes.get_errno())}.\nRaise the limit of parts (sysctl vm.max_map_count=1000000)."
            )
        self._memory.madvise(mmap.MADV_DONTFORK, offset_bytes, size_bytes)
        self._mapped.append((offset_bytes, offset_bytes + size_bytes))
        self.host_bytes -= size_bytes

    @property
    def _address(self) -> int:
        return torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()

    def lock(self) -> None:
        """Register the memory, and place untouched pages near this thread. Raise ``HostMemoryError`` if refused."""
        if self._register is None or self._memory is None:
            return
        # Each part between files, because copies from and to the host must not leave a part.
        borders = [0, *chain.from_iterable(sorted(self._mapped)), self.size_bytes]
        registered = self._memory.registered = []
        try:
            for begin, end in zip(borders[::2], borders[1::2], strict=True):
                if begin < end:
                    registered.append(self._register(self._address + begin, end - begin))
        except RuntimeError as error:
            raise HostMemoryError(
                f"A rank's host memory must be page-locked, so that transfers overlap; found "
                f"{self.size_bytes / 1e9:.3g} GB refused: {error}.\n{LOCK_REMEDY}"
            ) from error

    def unlock(self) -> None:
        """Undo ``lock``, after copies in flight have ended."""
        if self._memory is not None:
            self._memory.unregister()

    def close(self) -> None:
        """Unregister the memory. The pages return to the system once no tensor over them is left."""
        self.unlock()
        self._memory = None


def _map(size_bytes: int) -> HostMapping:
    try:
        # A shared mapping would be a file in memory, with other rules for container limits and huge pages.
        memory = HostMapping(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise HostMemoryError(
            f"A rank's host memory must be within what the system lets a process map; found {size_bytes / 1e9:.3g} GB "
            f"refused: {error.strerror}.\n"
            "Raise ulimit -v, or vm.overcommit_ratio where vm.overcommit_memory is 2, or train on more ranks."
        ) from error
    # After a fork, the process that writes to a page first gets a copy. If that were the parent, the accelerator would
    # use a page that is no longer the parent's. Newer kernels copy the whole slab for each data loader.
    memory.madvise(mmap.MADV_DONTFORK)
    _mappings.add(memory)
    if size_bytes >= HUGE_PAGE_BYTES:
        # A Linux kernel that is built without huge pages refuses this advice.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
