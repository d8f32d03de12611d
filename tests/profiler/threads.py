"""Run a program on ranks that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from deep_opt_states.profiler.ranks import Ranks

Value = TypeVar("Value")

TIMEOUT_S = 60


class Meeting:
    """The values and the barrier that all ranks share."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)


class ThreadRank(Ranks):
    """One rank, for use on its own thread."""

    rank = 0
    size = 1

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        self.rank = rank
        self.size = size
        self._meeting = meeting

    def gather(self, value: Value) -> list[Value]:
        """Return every rank's value. Raise ``BrokenBarrierError`` if another rank does not call this in time."""
        self._meeting.values[self.rank] = value
        self._meeting.barrier.wait()
        values = list(self._meeting.values)
        self._meeting.barrier.wait()
        return values


def on_ranks(size: int, program: Callable[[Ranks], Value]) -> list[Value | Exception]:
    """Return the value that ``program`` returns, or the error that it raises, on each rank."""
    meeting = Meeting(size)

    def outcome(rank: int) -> Value | Exception:
        try:
            return program(ThreadRank(rank, size, meeting))
        except Exception as error:  # noqa: BLE001 (the test checks the error)
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(outcome, range(size)))
