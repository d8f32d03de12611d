"""Host memory in one allocation, registered once, in which every tensor has a storage of its own."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import torch

HUGE_PAGE_BYTES = 2 * 2**20

Register: TypeAlias = Callable[[int, int], Callable[[], object]]
"""Page-locks an address range, given as its start and its bytes, and returns what undoes that.

What it returns waits first for the copies that the accelerator still makes from or to the range. It may be called on
any thread.
"""

LOCK_REMEDY = (
    "Raise the memlock limit (ulimit -l unlimited; of a container --ulimit memlock=-1), or train on more ranks."
)


class HostMemoryError(RuntimeError):
    """The host has no room for the states, or may not give it."""


class Mapping(mmap.mmap):
    """Anonymous memory of this process that is unregistered before it is unmapped.

    The slab and each tensor over it hold a reference to it. Whichever is dropped last, the pages are not given back to
    the system while the driver still has them registered: an engine may be collected without ``destroy()``.

    A ``weakref.finalize`` would come too late: ``mmap.mmap`` unmaps before it calls the callbacks of weak references.
    """

    unregister_once: Callable[[], object] | None = None

    def unregister(self) -> None:
        """Undo the registration, if there is one that is not undone yet."""
        unregister, self.unregister_once = self.unregister_once, None
        if unregister is not None:
            unregister()

    def __del__(self) -> None:
        # While the interpreter shuts down, the driver may be gone, and the process is about to give everything back.
        if not sys.is_finalizing():
            self.unregister()


_mappings: weakref.WeakSet[Mapping] = weakref.WeakSet()


def _keep_mappings_in_forked_child() -> None:
    """Keep a forked child from unmapping addresses that it did not inherit, and may have given to other memory.

    The child has the Python objects of its parent, without the memory behind them. An object whose reference count
    never drops to zero is never finalized, also not when the child's interpreter shuts down.
    """
    for mapping in _mappings:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))


os.register_at_fork(after_in_child=_keep_mappings_in_forked_child)


class HostSlab:
    """``size_bytes`` of zeros; pageable, or page-locked by ``register`` when ``lock`` is called.

    Raises ``HostMemoryError`` where the system refuses them.

    The pages are not there before something touches them, and then near the core that did (NUMA).

    A forked child does not inherit them: a child that reads or writes a tensor over them is ended by SIGSEGV.
    """

    def __init__(self, size_bytes: int, register: Register | None = None) -> None:
        self.size_bytes = size_bytes
        self._register = register
        self._memory: Mapping | None = None
        if size_bytes > 0:
            self._memory = _mapped(size_bytes)

    def tensor(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Shape [numel]. It keeps the memory, and has a storage of its own: ``torch.save`` writes whole storages, also
        for a view of one."""
        assert self._memory is not None
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=offset_bytes)

    def lock(self) -> None:
        """To be called once all is touched: registering touches the rest, near the core that registers.

        Raises ``HostMemoryError`` where the driver refuses.
        """
        if self._register is None or self._memory is None:
            return
        address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        try:
            self._memory.unregister_once = self._register(address, self.size_bytes)
        except RuntimeError as error:
            raise HostMemoryError(
                f"A rank's host memory must be page-locked, so that transfers overlap; found "
                f"{self.size_bytes / 1e9:.3g} GB refused: {error}.\n{LOCK_REMEDY}"
            ) from error

    def close(self) -> None:
        """The system has the pages back once no tensor over them is left."""
        if self._memory is not None:
            self._memory.unregister()
        self._memory = None


def _mapped(size_bytes: int) -> Mapping:
    try:
        # Private: what is shared is a file in memory, which container limits and huge pages treat otherwise.
        memory = Mapping(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise HostMemoryError(
            f"A rank's host memory must be within what the system lets a process map; found {size_bytes / 1e9:.3g} GB "
            f"refused: {error.strerror}.\n"
            "Raise ulimit -v, or vm.overcommit_ratio where vm.overcommit_memory is 2, or train on more ranks."
        ) from error
    # A fork would leave each page to whichever process writes to it last, and give the parent a copy. The accelerator
    # would go on to copy from and to the page that was registered, which is no longer the parent's. Newer kernels copy
    # registered pages at once instead: the whole slab, for each process that loads data.
    memory.madvise(mmap.MADV_DONTFORK)
    _mappings.add(memory)
    if size_bytes >= HUGE_PAGE_BYTES:
        # They only make it faster; a kernel built without them refuses to be asked.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
