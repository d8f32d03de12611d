"""Vector clocks: for each lane (a stream or a host thread), the operations that are known to have happened before."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stamp:
    """The position of one operation: the ``count``-th of ``lane``."""

    lane: str
    count: int


@dataclass
class Clock:
    """A vector clock: for each lane, how many of its operations are known to have happened."""

    counts: dict[str, int] = field(default_factory=dict)

    def join(self, other: Clock) -> None:
        """Add the operations that ``other`` includes."""
        for lane, count in other.counts.items():
            self.counts[lane] = max(self.counts.get(lane, 0), count)

    def tick(self, lane: str) -> Stamp:
        """Add the next operation of ``lane``, and return its stamp."""
        self.counts[lane] = self.counts.get(lane, 0) + 1
        return Stamp(lane, self.counts[lane])

    def includes(self, stamp: Stamp) -> bool:
        """Return whether the operation with this stamp is known to have happened."""
        return self.counts.get(stamp.lane, 0) >= stamp.count

    def copy(self) -> Clock:
        return Clock(dict(self.counts))
