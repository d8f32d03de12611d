"""Describe a run, derive the seconds and rates of one update, and compare a number of updates with their prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from perf_model.prediction.cost import traffic_by_action
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.timeline import IterationTimes, Phase, PhaseSpan, Timeline, seconds_of
from perf_model.schedule.action import ActionKind, Lane
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.units import seconds

FORMAT = 5
"""The version of the files in a run's folder."""

UPDATE = "update"
EXPOSED = "exposed"

LEAST_COMPARED_S = 1e-3
"""The least seconds, predicted and measured, whose error is stated."""

LANES_OF_DIRECTION = {"h2d": (Lane.H2D, Lane.PUBLISH), "d2h": (Lane.D2H,)}
"""The lanes that only copy. The compute lane also copies to the host if DeepSpeed offloads parameters."""


@dataclass(frozen=True, kw_only=True)
class ReportedPlan:
    """The plan of the updates, with the bytes per parameter of the tensors that they copy."""

    plan: UpdatePlan
    widths: Widths
    predict: Callable[[Windows], PredictedUpdate] | None = None
    read_windows: Callable[[], Windows | None] = lambda: None
    """Returns backward and forward without an update alongside; None while they are unknown."""
    read_iteration: Callable[[], IterationTimes | None] = lambda: None
    """Returns the iteration after the update that is being reported; None if no update has followed it."""
    read_memory_bytes: Callable[[], int | None] = lambda: None
    """Returns the GPU memory that PyTorch holds now; if the accelerator is the CPU, the memory of the process."""
    predict_stock: Callable[[], float | None] = lambda: None
    """Returns the predicted seconds of stock's update, at least; None without a profile."""
    description: Sequence[str] = ()
    """The end of the summary."""

    def bytes_per_s(self, direction: str, timeline: Timeline) -> float | None:
        """Return the bytes that were copied in ``direction``, "h2d" or "d2h", per second in which it was busy."""
        lanes = LANES_OF_DIRECTION[direction]
        traffic, units = traffic_by_action(self.widths), self.plan.workload.units
        actions = [span.action for span in timeline.spans if span.action.lane in lanes]
        moved = sum(getattr(traffic[action.kind], direction) * units[action.unit].numel for action in actions)
        return _rate(moved, timeline.busy_s(*lanes))


@dataclass(frozen=True)
class MeasuredUpdate:
    """The seconds of one update, ``by_kind`` the sum of the actions of each kind.

    ``update_s`` starts with the decision that the step is not skipped. The model waited for ``exposed_s``, and computed
    ``forward_s`` during the update.
    """

    by_kind: Mapping[ActionKind, float]
    update_s: float
    exposed_s: float
    forward_s: float

    @classmethod
    def from_timeline(cls, timeline: Timeline, phases: Sequence[PhaseSpan]) -> MeasuredUpdate:
        """Return the seconds of the update with this timeline, during which the model was in ``phases``."""
        exposed_s = seconds_of(Phase.EXPOSED, phases)
        forward_s = seconds_of(Phase.FORWARD, phases)
        # Without overlap with forward, an update ends when the model stops waiting for it.
        update_s = timeline.end_s if forward_s > 0 else exposed_s
        return cls(timeline.seconds_by_kind(), update_s, exposed_s, forward_s)


@dataclass(frozen=True)
class UpdateRecord:
    """One update that ran. ``read_timeline`` reads two device events per action, and is called at most once."""

    step: int
    samples: int
    """The ``global_steps`` and ``global_samples`` of training, over all ranks."""
    is_due: bool
    """Whether the log has a line about this update."""
    phases: Sequence[PhaseSpan]
    plan: ReportedPlan
    read_timeline: Callable[[], Timeline]

    @cached_property
    def timeline(self) -> Timeline:
        """Return the measured timeline, which is read once."""
        return self.read_timeline()

    @cached_property
    def measured(self) -> MeasuredUpdate:
        """Return the seconds that are compared with the prediction."""
        return MeasuredUpdate.from_timeline(self.timeline, self.phases)

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """Return the reported numbers, which are first read while the update is being reported.

        The iteration after the update is ``exposed_s``, ``forward_s`` and ``backward_s``, all of its micro-batches but
        the forward of the first one, None if no update has followed. ``last_backward_s`` is the last backward before
        the update, alongside eager units. A rate is None if nothing was moved, or if the time was too short.
        """
        measured, timeline, numel = self.measured, self.timeline, self.plan.plan.workload.numel
        iteration, forward_s, backward_s = self.plan.read_iteration(), None, None
        if iteration is not None and iteration.backward_start_s is not None:
            forward_s = max(0.0, iteration.backward_start_s - measured.exposed_s)
            backward_s = iteration.end_s - iteration.backward_start_s
        return {
            "iteration_s": None if iteration is None else iteration.end_s,
            "forward_s": forward_s,
            "backward_s": backward_s,
            "last_backward_s": seconds_of(Phase.BACKWARD, self.phases),
            "memory_bytes": self.plan.read_memory_bytes(),
            "update_s": measured.update_s,
            "exposed_s": measured.exposed_s,
            "hidden_s": timeline.hidden_s(measured.exposed_s),
            "cpu_adam_s": timeline.busy_s(Lane.CPU),
            "params_per_s": _rate(numel, measured.update_s),
            "h2d_bytes_per_s": self.plan.bytes_per_s("h2d", timeline),
            "d2h_bytes_per_s": self.plan.bytes_per_s("d2h", timeline),
            "gpu_share": 1 - self.plan.plan.numel(Placement.CPU) / max(1, numel),
        }


def _rate(amount: float, duration_s: float) -> float | None:
    return amount / duration_s if amount > 0 and duration_s > 0 else None


@dataclass(frozen=True)
class PredictedUpdate:
    """The timeline of an update, its exposed seconds, and the phases of the model during the update."""

    timeline: Timeline
    exposed_s: float
    phases: tuple[PhaseSpan, ...] = ()


@dataclass(frozen=True)
class ComparisonRow:
    """The predicted and the measured seconds of ``name``: a kind of actions, ``UPDATE`` or ``EXPOSED``."""

    name: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float | None:
        """Return the error relative to the measured seconds, positive for a prediction that is too high."""
        # Below a millisecond it would be large, but without effect.
        is_long = min(self.predicted_s, self.measured_s) >= LEAST_COMPARED_S
        return self.predicted_s / self.measured_s - 1 if is_long else None

    @property
    def shown_error(self) -> str:
        """Return the error in per cent, or an empty text."""
        return "" if self.error is None else f"{self.error:+.0%}"

    def __str__(self) -> str:
        error = f" ({self.shown_error})" if self.shown_error else ""
        return f"{self.name} {seconds(self.measured_s)}, predicted {seconds(self.predicted_s)}{error}"


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The facts about a run: ``began`` in ISO 8601 (local time), and the ``memory_bytes`` of rank 0 by kind."""

    began: str
    world_size: int
    accelerator: str
    software: Mapping[str, str]
    plan: UpdatePlan
    memory_bytes: Mapping[str, int]


def compare(predicted: PredictedUpdate, measured: Sequence[MeasuredUpdate]) -> list[ComparisonRow]:
    """Return the medians of the measured updates next to the prediction."""
    rows = [ComparisonRow(UPDATE, predicted.timeline.end_s, median(update.update_s for update in measured))]
    if median(update.forward_s for update in measured) > 0:
        rows.append(ComparisonRow(EXPOSED, predicted.exposed_s, median(update.exposed_s for update in measured)))
    for kind, predicted_s in predicted.timeline.seconds_by_kind().items():
        # A kind without predicted seconds has no error.
        if predicted_s > 0:
            rows.append(ComparisonRow(kind.value, predicted_s, median(update.by_kind[kind] for update in measured)))
    return rows
