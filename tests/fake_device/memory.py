"""Memory that is given back, as PyTorch's caching allocators do it, while work that was issued may still use it.

A tensor's memory is free as soon as the last Python reference to it is gone: an operation that was issued keeps an
address, not a reference. What is freed is overwritten with NaN as early as a next owner could:

- Device memory belongs to the stream it was allocated on. That stream's next operation may be the next owner's, so its
  own earlier work is safe; another stream's is safe only if ``record`` was called with it (CUDACachingAllocator).
- Pinned host memory belongs to the host, which may write at once. Asynchronous copies record their stream by
  themselves (CachingHostAllocator); kernels that read it through its address do not.
"""

from __future__ import annotations

import ctypes
import weakref

import torch

from tests.fake_device.queues import Lanes, Queue

_NAN_BYTE = 0xFF
"""All bits set is a NaN in fp32, fp16 and bf16."""


class Block:
    """``nbytes`` of device memory that belongs to the stream ``owner``, or of pinned memory where that is None."""

    def __init__(self, lanes: Lanes, nbytes: int, owner: Queue | None) -> None:
        self.nbytes = nbytes
        self.freed = False
        self._lanes = lanes
        self._users = set() if owner is None else {owner}
        self._memory = bytearray(nbytes or 1)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._overwrite()

    def hand_out(self, dtype: torch.dtype) -> torch.Tensor:
        """The user's tensor, called once. The block is freed with the last tensor that shares its storage."""
        buffer = (ctypes.c_uint8 * len(self._memory)).from_buffer(self._memory)
        weakref.finalize(buffer, self._free).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8)[: self.nbytes].view(dtype)

    def holds(self, tensor: torch.Tensor) -> bool:
        return not self.freed and 0 <= tensor.data_ptr() - self._bytes.data_ptr() < len(self._memory)

    def address_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same elements, shape and dtype, but not a reference that keeps the block from being freed."""
        assert tensor.is_contiguous()
        offset = tensor.data_ptr() - self._bytes.data_ptr()
        return self._bytes[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def record(self, stream: Queue) -> None:
        self._users.add(stream)

    def _free(self) -> None:
        self.freed = True
        finished = [queue.mark() for queue in self._users]
        self._lanes.as_soon_as(lambda: all(done() for done in finished), self._overwrite)

    def _overwrite(self) -> None:
        self._bytes.fill_(_NAN_BYTE)
