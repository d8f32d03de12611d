"""Run a program on ranks that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from deep_opt_states.profiler.ranks import Ranks

Value = TypeVar("Value")


class ThreadRank(Ranks):
    """One rank, for use on its own thread. All ranks share ``values`` and ``barrier``."""

    rank = size = 0

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(values)
        self._values, self._barrier = values, barrier

    def gather(self, value: Value) -> list[Value]:
        """Return every rank's value. Raise ``BrokenBarrierError`` if another rank does not call this in time."""
        self._values[self.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


def on_ranks(size: int, program: Callable[[Ranks], Value]) -> list[Value]:
    values, barrier = [None] * size, threading.Barrier(size, timeout=60)
    ranks = [ThreadRank(rank, values, barrier) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(program, ranks))
