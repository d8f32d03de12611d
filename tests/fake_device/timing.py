"""When queued work happens: any order that streams and events permit is one that a GPU may choose."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol


class Timing(Protocol):
    def lanes(self, count: int) -> Sequence[int]:
        """Asked before each operation: numbers below ``count``, the lane to be served first in front.

        Streams are numbered in the order of their creation, after them come the CPU lane and the caller's stream.
        """

    def runs_unasked(self) -> bool:
        """Asked again and again after something was issued: does the device finish one more operation by itself?"""


class Late:
    """As late as possible: nothing happens before the host waits for it, and then by strict priority.

    Whatever no wait holds back overtakes. Lanes that ``priorities`` does not name come last.
    """

    def __init__(self, priorities: Sequence[int] = ()) -> None:
        self._priorities = tuple(priorities)

    def lanes(self, count: int) -> Sequence[int]:
        return [*self._priorities, *(lane for lane in range(count) if lane not in self._priorities)]

    def runs_unasked(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"Late({list(self._priorities)})"


class Seeded:
    """Interleaved at random, the same for the same seed: lanes by lot, and a device that is prompt or lazy by lot."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = random.Random(seed)
        self._promptness = self._random.choice((0.0, 0.2, 0.5, 0.9))

    def lanes(self, count: int) -> Sequence[int]:
        return self._random.sample(range(count), count)

    def runs_unasked(self) -> bool:
        return self._random.random() < self._promptness

    def __repr__(self) -> str:
        return f"Seeded({self._seed})"
