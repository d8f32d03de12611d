"""Emulate GPU memory: accesses outside of a tensor, misaligned accesses and races between threads are errors."""

from __future__ import annotations

import numpy as np

from tests.kernels.ptx_parser import PtxError

NONE, SEVERAL = -1, -2
"""No thread, and more than one."""

WORD_BYTES = 2
"""The size of the smallest access of the kernel."""


class EmulatedMemory:
    """Words of 16 bits at an address, with the threads that read or wrote each of them.

    The interpreter executes one group of threads after another. A GPU executes them in any order. The results are the
    same because two threads never access a word of which one is a writer, unless a barrier is between the accesses.
    """

    def __init__(self, words: np.ndarray, address: int, *, writable: bool = True, initialized: bool = True) -> None:
        assert words.dtype == np.uint16
        assert words.ndim == 1
        self._words, self._address, self._writable = words, address, writable
        self._initialized = np.full(len(words), initialized)
        self._reader = np.full(len(words), NONE)
        self._writer = np.full(len(words), NONE)

    def contains(self, addresses: np.ndarray, size: int) -> bool:
        """Return whether the ``size`` bytes from each address on are in this memory."""
        begins = addresses - self._address
        return bool(((begins >= 0) & (begins + size <= WORD_BYTES * len(self._words))).all())

    def load(self, addresses: np.ndarray, size: int, threads: np.ndarray) -> np.ndarray:
        """Return the words of each address, of shape [addresses, size / 2]."""
        places, threads = self._places(addresses, size, threads)
        if not self._initialized[places].all():
            raise PtxError("reads memory that was not written")
        if self._written_by_others(places, threads):
            raise PtxError("reads a value that another thread wrote, without a barrier")
        others = (self._reader[places] != NONE) & (self._reader[places] != threads)
        self._reader[places] = threads
        # Several threads of this instruction may read the same word.
        others |= self._reader[places] != threads
        self._reader[places[others]] = SEVERAL
        return self._words[places]

    def store(self, addresses: np.ndarray, words: np.ndarray, threads: np.ndarray) -> None:
        """Write ``words``, of shape [addresses, size / 2]."""
        if not self._writable:
            raise PtxError("writes to a tensor that is only read")
        places, threads = self._places(addresses, WORD_BYTES * words.shape[1], threads)
        read = self._reader[places]
        if ((read != NONE) & (read != threads)).any() or self._written_by_others(places, threads):
            raise PtxError("writes an element that another thread reads or writes, without a barrier")
        self._writer[places] = threads
        if (self._writer[places] != threads).any():
            raise PtxError("two threads write to the same address")
        self._words[places] = words
        self._initialized[places] = True

    def pass_barrier(self, begin: int, end: int) -> None:
        """Order the accesses to the bytes [begin, end) so far before all later accesses."""
        words = slice(begin // WORD_BYTES, end // WORD_BYTES)
        self._reader[words] = self._writer[words] = NONE

    def pass_barrier_of_threads(self, begin: int, end: int) -> None:
        """Order the accesses of the threads [begin, end), which are a block, before all later accesses of theirs.

        Another block could access the same words, so those that several threads have read stay marked.
        """
        for accessed in (self._reader, self._writer):
            accessed[(begin <= accessed) & (accessed < end)] = NONE

    def _written_by_others(self, places: np.ndarray, threads: np.ndarray) -> bool:
        writer = self._writer[places]
        return bool(((writer != NONE) & (writer != threads)).any())

    def _places(self, addresses: np.ndarray, size: int, threads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the index of each accessed word, and its thread, both of shape [addresses, size / 2]."""
        if (addresses % size != 0).any():
            raise PtxError(f"accesses {size} bytes at an address that is no multiple of {size}")
        first = (addresses - self._address) // WORD_BYTES
        places = first[:, None] + np.arange(size // WORD_BYTES)
        return places, np.broadcast_to(threads[:, None], places.shape)
