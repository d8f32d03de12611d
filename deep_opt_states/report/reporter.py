"""Report each update to all sinks, and compare the updates with the prediction at the end of training."""

from __future__ import annotations

import atexit
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from deep_opt_states.report.comparison import (
    ComparisonRow,
    MeasuredUpdate,
    PredictedUpdate,
    compare,
    median_windows,
)
from deep_opt_states.report.record import StepCounts, UpdateRecord, Work
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.timeline import PhaseSpan, Timeline

WARM_UPDATES = 2
"""The number of first updates, which touch memory and wake threads, that are not compared."""

COMPARED_UPDATES = 100
"""The number of last updates that are compared."""


class ReportSink(Protocol):
    """A destination of reports: the log, DeepSpeed's monitor, or a folder."""

    name: str
    """The setting that enables the sink, as the user wrote it."""

    def updated(self, record: UpdateRecord, reporter: UpdateReporter) -> None:
        """Report one update."""

    def close(self, reporter: UpdateReporter) -> None:
        """Finish the report at the end of training; ``updated`` was never called if nothing was updated."""


@dataclass(frozen=True, kw_only=True)
class ReportedPlan:
    """The plan of the updates, as reports need it.

    ``work`` is the work of each update. ``predict`` predicts an update for given windows; None disables predictions.
    ``description`` describes the placements and is logged at the end.
    """

    work: Work
    predict: Callable[[Windows], PredictedUpdate] | None = None
    description: str = ""


class UpdateReporter:
    """A reporter of all updates of one engine.

    ``read_counts`` returns the counts of the update that is being reported. ``log`` prints a line. A sink that fails is
    logged once and then disabled, since a report must not end the training.
    """

    def __init__(
        self,
        plan: ReportedPlan,
        sinks: Sequence[ReportSink],
        read_counts: Callable[[], StepCounts],
        log: Callable[[str], None],
    ) -> None:
        self._sinks = list(sinks)
        self._read_counts = read_counts
        self._log = log
        self._measured: deque[MeasuredUpdate] = deque(maxlen=COMPARED_UPDATES)
        self._updates = 0
        self.change_plan(plan)
        self._closed = False
        # A script may end without destroying its engine.
        atexit.register(self.close)
        _ALIVE.add(self)

    def change_plan(self, plan: ReportedPlan) -> None:
        """Report ``plan`` from now on, and compare it with the updates from now on."""
        self._work, self._planned = plan.work, plan.description
        # A prediction is a simulation. The sinks and the end of training request the same one.
        self._predict = None if plan.predict is None else lru_cache(maxsize=1)(plan.predict)
        self._measured.clear()

    def updated(self, phases: Sequence[PhaseSpan], timeline: Callable[[], Timeline]) -> None:
        """Report one update.

        ``phases`` are the phases of the model before, during and after the update. ``timeline`` returns the measured
        timeline; it is called only if a reported number needs it.
        """
        self._updates += 1
        record = UpdateRecord(self._updates, self._read_counts(), phases, self._work, timeline)
        if self._predict is not None and self._updates > WARM_UPDATES:
            self._measured.append(record.measured)
        self._call_sinks(lambda sink: sink.updated(record, self))

    @property
    def compared_updates(self) -> int:
        """Return the number of updates that are compared with the prediction."""
        return len(self._measured)

    def comparison(self) -> list[ComparisonRow]:
        """Compare the updates so far with the prediction; the list is empty without prediction or measurement."""
        if self._predict is None or not self._measured:
            return []
        return compare(self._predict, self._measured)

    def prediction(self) -> PredictedUpdate | None:
        """Return the prediction that ``comparison`` uses, or None without prediction or measurement."""
        if self._predict is None or not self._measured:
            return None
        return self._predict(median_windows(self._measured))

    def close(self) -> None:
        """Log the plan and the accuracy of the prediction at the end of training; later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._planned and self._updates:
            self._log(self._planned)
        if rows := self.comparison():
            lines = "\n".join(f"  {row}" for row in rows)
            self._log(
                f"predicted against measured, median of {len(self._measured)} of {self._updates} updates:\n{lines}"
            )
        self._call_sinks(lambda sink: sink.close(self))

    def _call_sinks(self, call: Callable[[ReportSink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:  # noqa: BLE001
                self._sinks.remove(sink)
                self._log(
                    f"{sink.name}: the update cannot be reported there: {type(error).__name__}: {error}. "
                    f"This report is disabled now; training continues."
                )


_ALIVE: weakref.WeakSet[UpdateReporter] = weakref.WeakSet()


def _close_in_forked_child() -> None:
    """Prevent a forked child that runs its exit callbacks from writing its parent's report."""
    for reporter in _ALIVE:
        reporter._closed = True


os.register_at_fork(after_in_child=_close_in_forked_child)
