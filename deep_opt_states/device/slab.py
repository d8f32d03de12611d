"""Host memory in one allocation, registered once, in which every tensor has a storage of its own."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import torch

HUGE_PAGE_BYTES = 2 * 2**20

Register: TypeAlias = Callable[[int, int], Callable[[], object]]
"""Page-locks an address range, given as its start and its bytes, and returns what undoes that."""

LOCK_REMEDY = (
    "Raise the memlock limit (ulimit -l unlimited; of a container --ulimit memlock=-1), or train on more ranks."
)


class HostMemoryError(RuntimeError):
    """The host has no room for the states, or may not give it."""


class HostSlab:
    """``size_bytes`` of zeros; pageable, or page-locked by ``register`` when ``lock`` is called.

    Raises ``HostMemoryError`` where the system refuses them.

    The pages are not there before something touches them, and then near the core that did (NUMA).
    """

    def __init__(self, size_bytes: int, register: Register | None = None) -> None:
        self.size_bytes = size_bytes
        self._register = register
        self._unregister: Callable[[], object] | None = None
        self._memory: mmap.mmap | None = None
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
            self._unregister = self._register(address, self.size_bytes)
        except RuntimeError as error:
            raise HostMemoryError(
                f"A rank's host memory must be page-locked, so that transfers overlap; found "
                f"{self.size_bytes / 1e9:.3g} GB refused: {error}.\n{LOCK_REMEDY}"
            ) from error

    def close(self) -> None:
        """The system has the pages back once no tensor over them is left."""
        if self._unregister is not None:
            self._unregister()
            self._unregister = None
        self._memory = None


def _mapped(size_bytes: int) -> mmap.mmap:
    try:
        # Private: what is shared is a file in memory, which container limits and huge pages treat otherwise.
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise HostMemoryError(
            f"A rank's host memory must be within what the system lets a process map; found {size_bytes / 1e9:.3g} GB "
            f"refused: {error.strerror}.\n"
            "Raise ulimit -v, or vm.overcommit_ratio where vm.overcommit_memory is 2, or train on more ranks."
        ) from error
    if size_bytes >= HUGE_PAGE_BYTES:
        # They only make it faster; a kernel built without them refuses to be asked.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
