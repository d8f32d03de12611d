"""Compare predicted with measured seconds: of the whole update, of its exposed part, and of its actions by kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.timeline import Phase, PhaseSpan, Timeline, seconds_of
from perf_model.schedule.action import ActionKind
from perf_model.units import seconds

UPDATE = "update"
EXPOSED = "exposed"


@dataclass(frozen=True)
class ComparisonRow:
    """The predicted and the measured seconds of ``name``.

    ``name`` is a kind of action, for the sum of all its actions, ``UPDATE`` for the whole update, or ``EXPOSED`` for
    the part of it that the model waited for.
    """

    name: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Return the error relative to the measured seconds; it is positive if the prediction was too high."""
        return self.predicted_s / self.measured_s - 1 if self.measured_s > 0 else 0.0

    def __str__(self) -> str:
        return (
            f"{self.name:<13} predicted {seconds(self.predicted_s):>8}, measured {seconds(self.measured_s):>8}, "
            f"error {self.error:+.0%}"
        )


@dataclass(frozen=True)
class PredictedUpdate:
    """The timeline of an update, its exposed seconds, and the phases of the model during the update."""

    timeline: Timeline
    exposed_s: float
    phases: tuple[PhaseSpan, ...] = ()


@dataclass(frozen=True)
class MeasuredUpdate:
    """The seconds of one update.

    ``by_kind`` sums the actions of each kind. ``update_s`` is the time from the decision that the step is not skipped
    to the end of the update, ``exposed_s`` the time that the model waited for the update, and ``windows`` the backward
    and forward time that it overlapped with.
    """

    by_kind: Mapping[ActionKind, float]
    update_s: float
    exposed_s: float
    windows: Windows

    @classmethod
    def from_timeline(cls, timeline: Timeline, phases: Sequence[PhaseSpan]) -> MeasuredUpdate:
        """Return the seconds of the update with this timeline, during which the model was in ``phases``."""
        exposed_s = seconds_of(Phase.EXPOSED, phases)
        windows = Windows(backward_s=seconds_of(Phase.BACKWARD, phases), forward_s=seconds_of(Phase.FORWARD, phases))
        # An update that does not overlap with the next forward ends when the model stops waiting for it.
        update_s = timeline.end_s if windows.forward_s > 0 else exposed_s
        return cls(timeline.seconds_by_kind(), update_s, exposed_s, windows)


def median_windows(measured: Sequence[MeasuredUpdate]) -> Windows:
    """Return the medians of the backward and the forward time that the updates overlapped with."""
    return Windows(
        backward_s=median(update.windows.backward_s for update in measured),
        forward_s=median(update.windows.forward_s for update in measured),
    )


def compare(predict: Callable[[Windows], PredictedUpdate], measured: Sequence[MeasuredUpdate]) -> list[ComparisonRow]:
    """Return the medians of the measured updates next to the prediction for the medians of their windows."""
    windows = median_windows(measured)
    predicted = predict(windows)
    rows = [ComparisonRow(UPDATE, predicted.timeline.end_s, median(update.update_s for update in measured))]
    if windows.forward_s > 0:
        rows.append(ComparisonRow(EXPOSED, predicted.exposed_s, median(update.exposed_s for update in measured)))
    by_kind = predicted.timeline.seconds_by_kind()
    rows.extend(
        ComparisonRow(kind.value, by_kind[kind], median(update.by_kind[kind] for update in measured))
        for kind in ActionKind
        # A kind without predicted seconds has no error, such as PUBLISH if the CPU updates the model's parameters.
        if by_kind.get(kind, 0.0) > 0
    )
    return rows
