"""Predicted against measured: seconds of the update, what is seen of them, and of its actions by kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.timeline import Phase, PhaseSpan, Timeline, seconds_of
from perf_model.schedule.action import ActionKind
from perf_model.units import seconds

UPDATE = "update"
EXPOSED = "of it exposed"


@dataclass(frozen=True)
class Compared:
    """``what`` is a kind of action, all of whose actions count, or the whole update, or what is seen of it."""

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


@dataclass(frozen=True)
class Predicted:
    """``exposed_s`` of it are seen; ``phases`` say when, and what the model does otherwise."""

    timeline: Timeline
    exposed_s: float
    phases: tuple[PhaseSpan, ...] = ()


@dataclass(frozen=True)
class Measured:
    """One update: seconds by kind of action, from the decision to its end, that the model waited for it, and that it
    went on beside it."""

    by_kind: Mapping[ActionKind, float]
    update_s: float
    exposed_s: float
    windows: Windows

    @classmethod
    def of(cls, timeline: Timeline, phases: Sequence[PhaseSpan]) -> Measured:
        exposed_s = seconds_of(Phase.EXPOSED, phases)
        windows = Windows(backward_s=seconds_of(Phase.BACKWARD, phases), forward_s=seconds_of(Phase.FORWARD, phases))
        # All that is seen of an update that nothing goes on beside is what it takes.
        update_s = timeline.end_s if windows.forward_s > 0 else exposed_s
        return cls(seconds_by_kind(timeline), update_s, exposed_s, windows)


def median_windows(measured: Sequence[Measured]) -> Windows:
    return Windows(
        backward_s=median(its.windows.backward_s for its in measured),
        forward_s=median(its.windows.forward_s for its in measured),
    )


def compare(predict: Callable[[Windows], Predicted], measured: Sequence[Measured]) -> list[Compared]:
    """Medians of what was measured, and what is predicted beside their windows."""
    windows = median_windows(measured)
    predicted = predict(windows)
    rows = [Compared(UPDATE, predicted.timeline.end_s, median(its.update_s for its in measured))]
    if windows.forward_s > 0:
        rows.append(Compared(EXPOSED, predicted.exposed_s, median(its.exposed_s for its in measured)))
    by_kind = seconds_by_kind(predicted.timeline)
    rows.extend(
        Compared(kind.value, by_kind[kind], median(its.by_kind[kind] for its in measured))
        for kind in ActionKind
        # Nothing is published where the CPU updates what the model reads.
        if by_kind.get(kind, 0.0) > 0
    )
    return rows
