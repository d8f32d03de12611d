"""Record for every storage its place, the stream that it was allocated on, and the accesses that may still conflict."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.zero.race_detector.clocks import Clock, Stamp

_expired = torch.UntypedStorage._expired
"""Whether a storage is freed. Every operation asks this of every storage, without the calls of ``StorageWeakRef``."""


class Place(Enum):
    """The two kinds of memory. Both are CPU memory; they differ in the device index that a tensor is created with."""

    HOST = torch.device("cpu")
    ACCELERATOR = torch.device("cpu", 0)


@dataclass(frozen=True)
class Access:
    """A read or a write of the bytes from ``begin`` to ``end`` of a storage, by ``operation``."""

    stamp: Stamp
    writes: bool
    begin: int
    end: int
    operation: str

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} on {self.stamp.lane} by {self.operation}"


@dataclass
class Memory:
    """One storage and its accesses.

    ``owner`` is the lane that it was allocated on. ``recorded_streams`` are the streams that were passed to
    ``record_stream``. ``last_access`` holds the last access of each lane.
    """

    name: str
    place: Place
    pinned: bool
    owner: str
    alive: StorageWeakRef
    accesses: list[Access] = field(default_factory=list)
    last_access: dict[str, Access] = field(default_factory=dict)
    recorded_streams: set[str] = field(default_factory=set)

    def add_access(self, access: Access, clock: Clock) -> list[Access]:
        """Record ``access``, which happens at ``clock``, and return the earlier accesses that conflict with it.

        A conflict is an overlapping access that nothing orders before ``access``, if at least one of both is a write.
        """
        unordered = []
        kept = []
        for other in self.accesses:
            overlap = other.begin < access.end and access.begin < other.end
            known = clock.includes(other.stamp)
            if overlap and not known and (other.writes or access.writes):
                unordered.append(other)
            # An earlier access that is ordered before this one, and that this one covers, need not be kept: a later
            # access is ordered after this one, and then after both, or its conflict with this one is found.
            covered = access.begin <= other.begin and other.end <= access.end
            if not (covered and known and (access.writes or not other.writes)):
                kept.append(other)
        self.accesses = [*kept, access]
        self.last_access[access.stamp.lane] = access
        return unordered

    def still_used(self, clock: Clock) -> list[Access]:
        """Return the accesses that may be in flight when the next owner of the memory begins at ``clock``."""
        return [access for access in self.last_access.values() if not clock.includes(access.stamp)]


class Memories:
    """All known storages. When a storage is freed, a later storage may have the same address."""

    def __init__(self) -> None:
        self._by_storage: dict[int, Memory] = {}

    def find(self, tensor: torch.Tensor) -> Memory | None:
        memory = self._by_storage.get(tensor.untyped_storage()._cdata)
        return None if memory is None or _expired(memory.alive.cdata) else memory

    def add(self, tensor: torch.Tensor, memory: Memory) -> None:
        self._by_storage[tensor.untyped_storage()._cdata] = memory

    def pop_freed(self) -> list[Memory]:
        """Remove the storages that were freed, and return them."""
        freed = [key for key, memory in self._by_storage.items() if _expired(memory.alive.cdata)]
        return [self._by_storage.pop(key) for key in freed]


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the byte range in its storage from the first to the last element of ``tensor``, end exclusive."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset()
    return begin * tensor.element_size(), (begin + last + 1) * tensor.element_size()
