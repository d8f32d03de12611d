"""Emulate memory that is freed, as by PyTorch's caching allocators, while operations in flight may still use it.

The memory of a tensor is free as soon as the last Python reference to it is gone: an operation that was issued keeps an
address, not a reference. Freed memory is overwritten with NaN as early as its next owner could write to it:

- Device memory belongs to the stream it was allocated on. That stream's next operation may be the next owner's, so the
  stream's own earlier operations are safe. Operations of another stream are safe only if ``record`` was called with it
  (CUDACachingAllocator).
- Pinned host memory belongs to the host, which may write at once. Asynchronous copies record their stream by themselves
  (CachingHostAllocator); kernels that read the memory through its address do not.

A copy that writes to the memory later would overwrite the data of its next owner: it raises ``AssertionError``.
"""

from __future__ import annotations

import ctypes
import weakref

import torch

from tests.fake_device.queues import Lanes, Queue

_NAN_BYTE = 0xFF
"""All bits set is a NaN in fp32, fp16 and bf16."""


class Allocation:
    """A block of ``nbytes`` bytes: device memory of the stream ``owner``, or pinned memory if ``owner`` is None."""

    def __init__(self, lanes: Lanes, nbytes: int, owner: Queue | None) -> None:
        self.nbytes = nbytes
        self.freed = False
        self.is_reused = False
        """Whether the block may be another owner's by now."""
        self._lanes = lanes
        self._users = set() if owner is None else {owner}
        self._memory = bytearray(nbytes or 1)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.fill_with_nan()

    def fill_with_nan(self) -> None:
        """Overwrite all elements, as any write of another owner does."""
        self._bytes.fill_(_NAN_BYTE)

    def hand_out(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the user's tensor. Call this once: the block is freed with the last tensor that shares the storage."""
        buffer = (ctypes.c_uint8 * len(self._memory)).from_buffer(self._memory)
        weakref.finalize(buffer, self._free).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8)[: self.nbytes].view(dtype)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the memory of ``tensor`` is in this block."""
        return not self.freed and 0 <= tensor.data_ptr() - self._bytes.data_ptr() < len(self._memory)

    def address_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same elements, shape and dtype, without a reference that keeps the block from being freed."""
        assert tensor.is_contiguous()
        offset = tensor.data_ptr() - self._bytes.data_ptr()
        return self._bytes[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def record(self, stream: Queue) -> None:
        """Keep the memory from being reused before ``stream`` has done the operations issued so far."""
        self._users.add(stream)

    def _free(self) -> None:
        self.freed = True
        finished = [queue.mark() for queue in self._users]
        self._lanes.as_soon_as(lambda: all(done() for done in finished), self._overwrite)

    def _overwrite(self) -> None:
        self.is_reused = True
        self.fill_with_nan()
