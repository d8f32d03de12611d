"""Queues of work that has been issued and has not happened yet; a ``Timing`` says which of them is served next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tests.fake_device.timing import Timing

Operation = Callable[[], object]
Ready = Callable[[], bool]


class Deadlock(AssertionError):
    """Something waits for what nothing can finish."""


class Queue:
    """Operations in order, one at a time. ``issued`` and ``finished`` count them."""

    def __init__(self) -> None:
        self.issued = 0
        self.finished = 0
        self._operations: deque[tuple[Ready, Operation]] = deque()
        self._running = False

    def add(self, operation: Operation, ready: Ready = lambda: True) -> None:
        """Until it is ready and has run, the operation holds back those behind it."""
        self._operations.append((ready, operation))
        self.issued += 1

    def mark(self) -> Ready:
        """Whether all that has been issued *by now* has finished."""
        issued = self.issued
        return lambda: self.finished >= issued

    def run_one(self) -> bool:
        """Whether the next operation was ready, and has run."""
        # An operation of the CPU lane may wait, and let the others work meanwhile; its own lane stands still.
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
    """All queues of a device. ``ticks`` counts the operations that have run."""

    def __init__(self, timing: Timing) -> None:
        self.ticks = 0
        self.cpu = Queue()
        self.caller = Queue()
        self._streams: list[Queue] = []
        self._whenever: list[tuple[Ready, Operation]] = []
        self._timing = timing
        self._working = False

    def add_stream(self) -> Queue:
        self._streams.append(Queue())
        return self._streams[-1]

    def as_soon_as(self, ready: Ready, operation: Operation) -> None:
        """Runs ``operation`` before anything else that may run, once it is ready. Nobody can wait for it."""
        self._whenever.append((ready, operation))
        self._run_whenever()

    def idle(self) -> bool:
        """Whether all that was issued has finished."""
        return all(queue.finished == queue.issued for queue in self._queues())

    def run_until(self, done: Ready) -> None:
        """Let the device work until ``done``. Raises ``Deadlock``."""
        while not done():
            if not self._run_one():
                raise Deadlock("the host waits for work that nothing can finish")
        self._run_whenever()

    def run_unasked(self) -> None:
        """Something was issued: a prompt device starts on it."""
        if not self._working:
            while self._timing.runs_unasked() and self._run_one():
                pass

    def _run_one(self) -> bool:
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
