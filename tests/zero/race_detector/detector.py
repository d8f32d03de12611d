"""Record the lanes with their clocks and the accesses to memory, and find the accesses that break a rule."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from deep_opt_states.runtime.uninterrupted import THREAD_NAME
from tests.zero.race_detector.clocks import Clock
from tests.zero.race_detector.storages import Access, Memories, Memory, Place, extent

DEFAULT_STREAM = "default stream"
COMMUNICATION = "communication stream"
"""The stream on which asynchronous collectives run, as NCCL's do."""

HOST = "host "
"""The prefix of the lanes of host threads. A wait for the device does not wait for a thread."""

_HERE = str(Path(__file__).parent)
_TESTS = str(Path(__file__).parent / "test_")
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class RaceFinding:
    """A broken rule: ``rule``, the name of the ``memory``, and the two ``sides`` that conflict on it."""

    rule: str
    memory: str
    sides: tuple[str, str]


UNORDERED = "accesses must be ordered"
FREED = "memory that another stream uses must be recorded on that stream before it is freed"
ILLEGAL = "a kernel must not be given host memory"


class _Thread(threading.local):
    """The state of one host thread: the stack of its current streams, and how its operations are recorded."""

    def __init__(self) -> None:
        self.streams: list[str] = [DEFAULT_STREAM]
        self.paused = False
        self.to_host = False


@dataclass
class Recorder:
    """The record of one process: the clock of each lane, the accesses to each storage, and the findings."""

    findings: list[RaceFinding] = field(default_factory=list)
    accesses_by_lane: dict[str, int] = field(default_factory=dict)
    """The number of recorded operations per lane. A test reads from it which lanes were checked at all."""
    waits: list[str] = field(default_factory=list)
    """The callers that made the main thread wait for the accelerator or for our worker, in order, also those in
    sections, for whose end the main thread waits."""

    def __post_init__(self) -> None:
        self.memories = Memories()
        self.thread = _Thread()
        self._clocks: dict[str, Clock] = {}
        self._lock = threading.RLock()

    # Lanes

    @property
    def host(self) -> str:
        """Return the lane of the calling thread."""
        return f"{HOST}{threading.current_thread().name}"

    @property
    def stream(self) -> str:
        """Return the lane of the calling thread's current stream."""
        return self.thread.streams[-1]

    def clock(self, lane: str) -> Clock:
        return self._clocks.setdefault(lane, Clock())

    def snapshot(self, lane: str) -> Clock:
        """Return a clock that includes everything that has been issued on ``lane`` so far."""
        return self.clock(lane).copy()

    def order_after(self, lane: str, clock: Clock) -> None:
        """Order everything that ``lane`` does from now on after the operations that ``clock`` includes."""
        with self._lock:
            self.clock(lane).join(clock)

    def wait_on_host(self, clock: Clock) -> None:
        """Record that the calling thread waits until the accelerator has done everything that ``clock`` includes."""
        with self._lock:
            self.order_after(self.host, clock)
            if threading.current_thread().name in (threading.main_thread().name, THREAD_NAME):
                self.waits.append(callers())

    def snapshot_of_streams(self) -> Clock:
        """Return a clock that includes everything that has been issued on any stream so far."""
        clock = Clock()
        for lane in list(self._clocks):
            if not lane.startswith(HOST):
                clock.join(self._clocks[lane])
        return clock

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record no operation that the calling thread issues inside this context."""
        previous, self.thread.paused = self.thread.paused, True
        try:
            yield
        finally:
            self.thread.paused = previous

    # Memory

    def memory(self, tensor: torch.Tensor) -> Memory:
        """Return the storage of ``tensor``. An unknown one was allocated before the recording: plain host memory."""
        return self.memories.find(tensor) or self.allocated(tensor, Place.HOST)

    def allocated(self, tensor: torch.Tensor, place: Place) -> Memory:
        """Record that the storage of ``tensor`` was allocated at ``place`` by the calling thread or its stream."""
        with self._lock:
            self.check_freed()
            owner = self.stream if place is Place.ACCELERATOR else self.host
            memory = Memory(
                name=f"a tensor of {callers()}",
                place=place,
                pinned=False,
                owner=owner,
                alive=StorageWeakRef(tensor.untyped_storage()),
            )
            if place is Place.ACCELERATOR:
                # The allocator may reuse memory of the same stream while that stream's earlier kernels still use it.
                size_bytes = tensor.untyped_storage().nbytes()
                memory.accesses.append(Access(self.clock(owner).tick(owner), True, 0, size_bytes, "its last owner"))
            self.memories.add(tensor, memory)
            return memory

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return self.memory(tensor).place is Place.ACCELERATOR

    def record_accesses(
        self, lane: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], operation: str
    ) -> None:
        """Record that ``operation`` on ``lane`` accesses these tensors, ordered after the thread that issues it."""
        with self._lock:
            self.check_freed()
            clock = self.clock(lane)
            clock.join(self.clock(self.host))
            stamp = clock.tick(lane)
            self.accesses_by_lane[lane] = self.accesses_by_lane.get(lane, 0) + 1
            operation = f"{operation} in {callers()}"
            for tensors, writing in ((reads, False), (writes, True)):
                for tensor in tensors:
                    begin, end = extent(tensor)
                    if begin == end:
                        continue
                    memory = self.memory(tensor)
                    access = Access(stamp, writing, begin, end, operation)
                    for other in memory.add_access(access, clock):
                        if other.stamp != stamp:
                            self.add_finding(UNORDERED, memory, (str(other), str(access)))

    def check_freed(self) -> None:
        """Check the memory that was freed: the next operation of its owner may write to it."""
        for memory in self.memories.pop_freed():
            if memory.pinned:
                continue  # The allocator of pinned memory already waits for asynchronous copies.
            clock = self.snapshot(memory.owner)
            clock.join(self.clock(self.host))
            # When memory is freed, the allocator records an event on each stream that was passed to record_stream, and
            # waits for it before it reuses the memory. The event also covers the work that the stream has waited for.
            for stream in memory.recorded_streams:
                clock.join(self.clock(stream))
            for access in memory.still_used(clock):
                # A thread that uses the memory holds a reference, so the memory is not freed before.
                if not access.stamp.lane.startswith(HOST):
                    self.add_finding(FREED, memory, (f"freed on {memory.owner}", str(access)))

    def add_finding(self, rule: str, memory: Memory, sides: tuple[str, str]) -> None:
        """Record that ``rule`` was broken; the same finding is recorded once."""
        finding = RaceFinding(rule, memory.name, sides)
        if finding not in self.findings:
            self.findings.append(finding)


def callers() -> str:
    """Return the nearest callers, at most five, that are neither PyTorch's code nor the race detector's."""
    names: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(names) < 5:
        if name := _name_of_caller(frame.f_code.co_filename):
            names.append(f"{name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(names)


@cache
def _name_of_caller(path: str) -> str | None:
    """Return the file name of ``path``, or None for PyTorch's code and the race detector's.

    The name is cached, because the callers of every operation and of every allocation are recorded.
    """
    internal = path.startswith((_HERE, _TORCH, "<")) and not path.startswith(_TESTS)
    return None if internal or "contextlib" in path else Path(path).name
