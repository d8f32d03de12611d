"""Vector clocks: what each lane (a stream, a host thread) surely knows to have happened."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stamp:
    """The ``count``-th thing that happened on ``lane``."""

    lane: str
    count: int


@dataclass
class Clock:
    """How much of each lane has happened for sure."""

    counts: dict[str, int] = field(default_factory=dict)

    def join(self, other: Clock) -> None:
        for lane, count in other.counts.items():
            self.counts[lane] = max(self.counts.get(lane, 0), count)

    def tick(self, lane: str) -> Stamp:
        self.counts[lane] = self.counts.get(lane, 0) + 1
        return Stamp(lane, self.counts[lane])

    def knows(self, stamp: Stamp) -> bool:
        return self.counts.get(stamp.lane, 0) >= stamp.count

    def copy(self) -> Clock:
        return Clock(dict(self.counts))
