"""Choose when queued operations run. A GPU may choose any order that streams and events permit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol


class Timing(Protocol):
    """The choices that the hardware is free to make."""

    def lanes(self, count: int) -> Sequence[int]:
        """Return the lanes below ``count`` in the order in which they are tried. This is called before each operation.

        Streams are numbered in the order of their creation. After them come the CPU lane and the caller's stream.
        """

    def runs_before_wait(self) -> bool:
        """Return whether the device finishes one more operation before the host waits for it.

        After an operation is issued, this is called until it returns False.
        """


class Late:
    """A timing that is as late as possible: nothing runs before the host waits, and then by strict priority.

    Operations that no wait holds back overtake others. Lanes that ``priorities`` does not name come last, and lanes
    that do not exist yet are left out.
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
