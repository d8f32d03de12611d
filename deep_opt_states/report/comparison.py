"""Predicted against measured: seconds of the update, and of its actions by kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from perf_model.action import ActionKind
from perf_model.timeline import Timeline
from perf_model.units import seconds

UPDATE = "update"


@dataclass(frozen=True)
class Compared:
    """``what`` is a kind of action, all of whose actions count, or the whole update."""

    what: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Relative to what was measured; positive where the prediction was too high."""
        return self.predicted_s / self.measured_s - 1 if self.measured_s > 0 else 0.0

    def __str__(self) -> str:
        return (
            f"{self.what:<13} predicted {seconds(self.predicted_s):>8}, measured {seconds(self.measured_s):>8}, "
            f"error {self.error:+.0%}"
        )


def seconds_by_kind(timeline: Timeline) -> dict[ActionKind, float]:
    busy_s: dict[ActionKind, float] = defaultdict(float)
    for span in timeline.spans:
        busy_s[span.action.kind] += span.end_s - span.start_s
    return busy_s


def compare(
    predicted: Timeline, measured: Sequence[Mapping[ActionKind, float]], update_s: Sequence[float]
) -> list[Compared]:
    """Medians of what was measured: ``measured`` by kind, and ``update_s``, one entry an update each."""
    by_kind = seconds_by_kind(predicted)
    rows = [
        Compared(kind.value, by_kind[kind], median(its[kind] for its in measured))
        for kind in ActionKind
        if kind in by_kind
    ]
    return [Compared(UPDATE, predicted.end_s, median(update_s)), *rows]
