"""Takes the notes: lanes and their clocks, accesses to memory, and what is found wrong."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.zero.recording.clocks import Clock
from tests.zero.recording.memory import Access, Memories, Memory, Place, extent

DEFAULT_STREAM = "default stream"
COMMUNICATION = "communication stream"
"""Asynchronous collectives run here, as NCCL's do."""

HOST = "host "
"""What the lanes of threads begin with; no device waits for one."""

_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Finding:
    """``rule`` is what was broken, ``memory`` what it was broken on, by which two sides."""

    rule: str
    memory: str
    sides: tuple[str, str]


UNORDERED = "accesses must be ordered"
FREED = "memory handed to another stream must be recorded on it"
ILLEGAL = "a kernel cannot be given host memory"


class _Thread(threading.local):
    def __init__(self) -> None:
        self.streams: list[str] = [DEFAULT_STREAM]
        self.paused = False
        self.to_host = False


@dataclass
class Recorder:
    findings: list[Finding] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)
    """Accesses by lane: what did not run was not checked."""
    waits: list[str] = field(default_factory=list)
    """By whom the main thread was made to wait, for the accelerator or for our worker, in order."""

    def __post_init__(self) -> None:
        self.memories = Memories()
        self.thread = _Thread()
        self._clocks: dict[str, Clock] = {}
        self._lock = threading.RLock()

    # Lanes

    @property
    def host(self) -> str:
        return f"{HOST}{threading.current_thread().name}"

    @property
    def stream(self) -> str:
        return self.thread.streams[-1]

    def clock(self, lane: str) -> Clock:
        return self._clocks.setdefault(lane, Clock())

    def now(self, lane: str) -> Clock:
        """What whoever waits for all that ``lane`` has been given so far will know."""
        return self.clock(lane).copy()

    def learns(self, lane: str, clock: Clock) -> None:
        with self._lock:
            self.clock(lane).join(clock)

    def host_waits(self, clock: Clock) -> None:
        """The calling thread, for what the accelerator does until ``clock``."""
        with self._lock:
            self.learns(self.host, clock)
            if threading.current_thread() is threading.main_thread():
                self.waits.append(who())

    def all_streams(self) -> Clock:
        clock = Clock()
        for lane in list(self._clocks):
            if not lane.startswith(HOST):
                clock.join(self._clocks[lane])
        return clock

    @contextmanager
    def paused(self) -> Iterator[None]:
        previous, self.thread.paused = self.thread.paused, True
        try:
            yield
        finally:
            self.thread.paused = previous

    # Memory

    def memory(self, tensor: torch.Tensor) -> Memory:
        """What is not known was made before the recording began: plain host memory."""
        return self.memories.find(tensor) or self.allocated(tensor, Place.HOST)

    def allocated(self, tensor: torch.Tensor, place: Place) -> Memory:
        with self._lock:
            self.collect()
            owner = self.stream if place is Place.ACCELERATOR else self.host
            memory = Memory(
                name=f"a tensor of {who()}",
                place=place,
                pinned=False,
                owner=owner,
                alive=StorageWeakRef(tensor.untyped_storage()),
            )
            if place is Place.ACCELERATOR:
                # What was there before belonged to the same stream, which may not be done with it.
                size_bytes = tensor.untyped_storage().nbytes()
                memory.accesses.append(Access(self.clock(owner).tick(owner), True, 0, size_bytes, "its last owner"))
            self.memories.add(tensor, memory)
            return memory

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return self.memory(tensor).place is Place.ACCELERATOR

    def touch(self, lane: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], by: str) -> None:
        """``lane`` reads and writes, after what the issuing thread knows now."""
        with self._lock:
            self.collect()
            clock = self.clock(lane)
            clock.join(self.clock(self.host))
            stamp = clock.tick(lane)
            self.seen[lane] = self.seen.get(lane, 0) + 1
            by = f"{by} in {who()}"
            for tensors, writing in ((reads, False), (writes, True)):
                for tensor in tensors:
                    begin, end = extent(tensor)
                    if begin == end:
                        continue
                    memory = self.memory(tensor)
                    access = Access(stamp, writing, begin, end, by)
                    for other in memory.conflicts(access, clock):
                        if other.stamp != stamp:
                            self.found(UNORDERED, memory, (str(other), str(access)))

    def collect(self) -> None:
        """Memory whose last reference is gone goes back to its owner, whose next operation may write to it."""
        for memory in self.memories.take_dead():
            if memory.pinned:
                continue  # asynchronous copies record it by themselves
            clock = self.now(memory.owner)
            clock.join(self.clock(self.host))
            # The allocator marks each recorded stream when the memory is freed, and waits for all that comes before.
            for stream in memory.recorded:
                clock.join(self.clock(stream))
            for access in memory.still_used(clock):
                # A thread that uses it holds a reference.
                if not access.stamp.lane.startswith(HOST):
                    self.found(FREED, memory, (f"freed on {memory.owner}", str(access)))

    def found(self, rule: str, memory: Memory, sides: tuple[str, str]) -> None:
        finding = Finding(rule, memory.name, sides)
        if finding not in self.findings:
            self.findings.append(finding)


def who() -> str:
    """The nearest callers that are not PyTorch's or ours."""
    names: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(names) < 5:
        path = frame.f_code.co_filename
        if not path.startswith((_HERE, _TORCH, "<")) and "contextlib" not in path:
            names.append(f"{Path(path).name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(names)
