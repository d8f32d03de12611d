"""Queue operations that have been issued and not run yet. A ``Timing`` chooses the queue that is served next.

A GPU may choose any order that streams and events permit.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol


class Timing(Protocol):
    """The choices that the hardware is free to make."""

    def lanes(self, count: int) -> Sequence[int]:
        """Return the lanes below ``count``, which are streams, the CPU lane and the caller, in the order of trial."""

    def runs_before_wait(self) -> bool:
        """Return whether the device finishes one more operation before the host waits for it."""


class Late:
    """A timing that is as late as possible: nothing runs before the host waits, and then by strict priority.

    Lanes that ``priorities`` does not name come last.
    """

    def __init__(self, priorities: Sequence[int] = ()) -> None:
        self._priorities = tuple(priorities)

    def lanes(self, count: int) -> Sequence[int]:
        named = [lane for lane in self._priorities if lane < count]
        return [*named, *(lane for lane in range(count) if lane not in named)]

    def runs_before_wait(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"Late({list(self._priorities)})"


def late_lanes(count: int) -> list[Timing]:
    """Return ``count`` timings, in each of which another lane below ``count`` is behind all others of these."""
    return [Late([*(lane for lane in range(count) if lane != last), last]) for last in range(count)]


class Seeded:
    """A random timing, the same for the same seed. It draws the lanes, and how promptly operations run."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = random.Random(seed)
        self._promptness = self._random.choice((0.0, 0.2, 0.5, 0.9))

    def lanes(self, count: int) -> Sequence[int]:
        return self._random.sample(range(count), count)

    def runs_before_wait(self) -> bool:
        return self._random.random() < self._promptness

    def __repr__(self) -> str:
        return f"Seeded({self._seed})"


Operation = Callable[[], object]
Ready = Callable[[], bool]


class Deadlock(AssertionError):
    """The error that the host waits for work that no operation can finish."""


class Queue:
    """Operations that run in order, one at a time. ``issued`` and ``finished`` count them."""

    def __init__(self) -> None:
        self.issued = 0
        self.finished = 0
        self._operations: deque[tuple[Ready, Operation]] = deque()
        self._running = False

    def add(self, operation: Operation, ready: Ready = lambda: True) -> None:
        """Enqueue ``operation``. Until it is ready and has run, it holds back the operations behind it."""
        self._operations.append((ready, operation))
        self.issued += 1

    def mark(self) -> Ready:
        """Return a function that returns whether all operations issued *by now* have finished."""
        issued = self.issued
        return lambda: self.finished >= issued

    def run_one(self) -> bool:
        """Run the next operation if it is ready. Return whether it has run."""
        # An operation of the CPU lane may wait, and other queues run during the wait. Its own queue must not run then.
        if self._running or not self._operations or not self._operations[0][0]():
            return False
        _, operation = self._operations.popleft()
        self._running = True
        try:
            operation()
        finally:
            self._running = False
            self.finished += 1
        return True


class Lanes:
    """All queues of a fake device. ``ticks`` counts the operations that have run."""

    def __init__(self, timing: Timing) -> None:
        self.ticks = 0
        self.cpu = Queue()
        self.caller = Queue()
        self._streams: list[Queue] = []
        self._whenever: list[tuple[Ready, Operation]] = []
        self._timing = timing
        self._working = False

    def add_stream(self) -> Queue:
        """Return the queue of a new stream."""
        self._streams.append(Queue())
        return self._streams[-1]

    def as_soon_as(self, ready: Ready, operation: Operation) -> None:
        """Run ``operation`` as soon as it is ready, before any other operation. No stream can wait for it."""
        self._whenever.append((ready, operation))
        self._run_whenever()

    def run_until(self, done: Ready) -> None:
        """Run operations until ``done``. Raise ``Deadlock`` if none can run before that."""
        while not done():
            if not self.run_one():
                raise Deadlock("the host waits for work that nothing can finish")
        self._run_whenever()

    def run_before_wait(self) -> None:
        """Run operations until the timing stops them. Called after an operation was issued, before any wait."""
        if not self._working:
            while self._timing.runs_before_wait() and self.run_one():
                pass

    def run_one(self) -> bool:
        """Run the first operation that may run in the timing's order of lanes. Return whether there was one."""
        self._run_whenever()
        queues = self._queues()
        working, self._working = self._working, True
        try:
            ran = any(queues[lane].run_one() for lane in self._timing.lanes(len(queues)))
        finally:
            self._working = working
        self.ticks += ran
        return ran

    def _queues(self) -> list[Queue]:
        return [*self._streams, self.cpu, self.caller]

    def _run_whenever(self) -> None:
        for item in list(self._whenever):
            ready, operation = item
            if ready():
                self._whenever.remove(item)
                operation()
