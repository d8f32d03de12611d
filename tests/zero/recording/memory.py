"""Every storage: where it is, which stream it was allocated on, and the accesses to it that still count."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.zero.recording.clocks import Clock, Stamp


class Place(Enum):
    """Both are CPU memory, told apart by the index of the device that they are asked for with."""

    HOST = torch.device("cpu")
    ACCELERATOR = torch.device("cpu", 0)


@dataclass(frozen=True)
class Access:
    stamp: Stamp
    writes: bool
    begin: int
    end: int
    by: str

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} on {self.stamp.lane} by {self.by}"


@dataclass
class Memory:
    """One storage. ``owner`` is the lane that it was allocated on; ``recorded`` those given to ``record_stream``."""

    name: str
    place: Place
    pinned: bool
    owner: str
    alive: StorageWeakRef
    accesses: list[Access] = field(default_factory=list)
    users: dict[str, Access] = field(default_factory=dict)
    recorded: set[str] = field(default_factory=set)

    def conflicts(self, access: Access, clock: Clock) -> list[Access]:
        """Earlier accesses that nothing orders before ``access``, which happens at ``clock``; remembers it."""
        unordered = []
        kept = []
        for other in self.accesses:
            overlap = other.begin < access.end and access.begin < other.end
            known = clock.knows(other.stamp)
            if overlap and not known and (other.writes or access.writes):
                unordered.append(other)
            # Whoever comes after this access, or races with it, does so with what it covers.
            covered = access.begin <= other.begin and other.end <= access.end
            if not (covered and known and (access.writes or not other.writes)):
                kept.append(other)
        self.accesses = [*kept, access]
        self.users[access.stamp.lane] = access
        return unordered

    def still_used(self, clock: Clock) -> list[Access]:
        """Accesses that a next owner of the memory, which starts at ``clock``, may meet."""
        return [access for access in self.users.values() if not clock.knows(access.stamp)]


class Memories:
    """By storage. A storage that dies gives its address back, also to the next storage."""

    def __init__(self) -> None:
        self._by_storage: dict[int, Memory] = {}

    def find(self, tensor: torch.Tensor) -> Memory | None:
        memory = self._by_storage.get(tensor.untyped_storage()._cdata)
        return None if memory is None or memory.alive.expired() else memory

    def add(self, tensor: torch.Tensor, memory: Memory) -> None:
        self._by_storage[tensor.untyped_storage()._cdata] = memory

    def take_dead(self) -> list[Memory]:
        dead = {key: memory for key, memory in self._by_storage.items() if memory.alive.expired()}
        for key in dead:
            del self._by_storage[key]
        return list(dead.values())


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage between the first and the last element of ``tensor``."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset()
    return begin * tensor.element_size(), (begin + last + 1) * tensor.element_size()
