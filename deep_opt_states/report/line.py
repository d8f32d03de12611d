"""Report each update to the log, DeepSpeed's monitor and other sinks, and compare it with its prediction at the end."""

from __future__ import annotations

import atexit
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from statistics import median
from typing import Protocol

from deep_opt_states import log
from deep_opt_states.report.record import (
    EXPOSED,
    UPDATE,
    ComparisonRow,
    MeasuredUpdate,
    PredictedUpdate,
    ReportedPlan,
    UpdateRecord,
    compare,
)
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.timeline import Phase, PhaseSpan, Timeline, seconds_of
from perf_model.schedule.action import ActionKind
from perf_model.units import GB, counted, gigabytes_per_second, params_per_second, percent, seconds

WARM_UPDATES = 2
"""The number of first updates, which touch memory and wake threads, that are not compared."""

COMPARED_UPDATES = 100
"""The number of last updates that are compared, and the most of which a line shows the median."""

SLOW, EVERY_UPDATES = 2.0, 25
"""The ratio of measured to predicted seconds that is logged, and the number of updates between comparisons."""


class ReportSink(Protocol):
    """A destination of reports: the log, DeepSpeed's monitor, or a folder."""

    name: str
    """The setting that enables the sink, as the user wrote it."""

    def updated(self, record: UpdateRecord, reporter: UpdateReporter) -> None:
        """Report one update."""

    def close(self, reporter: UpdateReporter) -> None:
        """Finish the report at the end of training, also if nothing was updated."""
        return


class UpdateReporter:
    """A reporter of all updates of one engine. A sink that fails is logged and disabled: training must continue."""

    def __init__(
        self,
        plan: ReportedPlan,
        sinks: Sequence[ReportSink],
        read_counts: Callable[[], tuple[int, int]],
        every_n_steps: int,
    ) -> None:
        self._sinks = list(sinks)
        self._every_n_steps = every_n_steps
        self._read_counts = read_counts
        self._measured: deque[MeasuredUpdate] = deque(maxlen=COMPARED_UPDATES)
        self.updates = 0
        self.change_plan(plan)
        # A forked child's exit callbacks must not write its parent's report.
        self._open_in_process: int | None = os.getpid()
        # A script may end without destroying its engine.
        atexit.register(self.close)

    def change_plan(self, plan: ReportedPlan) -> None:
        """Report ``plan``, and compare it with the updates, from now on."""
        self._plan = plan
        self._predict = None if plan.predict is None else lru_cache(maxsize=1)(plan.predict)
        self._measured.clear()

    def updated(self, phases: Sequence[PhaseSpan], timeline: Callable[[], Timeline]) -> None:
        """Report one update with the ``phases`` around it. ``timeline`` is called only if a number needs it."""
        self.updates += 1
        step, samples = self._read_counts()
        record = UpdateRecord(step, samples, step % self._every_n_steps == 0, phases, self._plan, timeline)
        if self._predict is not None and self.updates > WARM_UPDATES:
            self._measured.append(record.measured)
        self._call_sinks(lambda sink: sink.updated(record, self))

    @property
    def compared_updates(self) -> int:
        return len(self._measured)

    def comparison(self) -> list[ComparisonRow]:
        """Compare the updates so far with the prediction; the list is empty if one of them is missing."""
        predicted = self.prediction()
        return [] if predicted is None else compare(predicted, self._measured)

    def prediction(self) -> PredictedUpdate | None:
        """Return the prediction that ``comparison`` uses, if any."""
        windows = self._plan.read_windows() if self._measured else None
        return None if windows is None or self._predict is None else self._predict(windows)

    def _summary(self) -> Iterator[str]:
        """Yield the summary of the updates in at most eight lines: two of seconds, forward, the plan and its memory."""
        rows = self.comparison()
        compared = f", median of the last {len(self._measured)} against the prediction:" if rows else ":"
        yield f"{counted(self.updates, 'update')}{compared}"
        of_model = [row for row in rows if row.name in (UPDATE, EXPOSED)]
        for of_line in (of_model, [row for row in rows if row not in of_model]):
            if of_line:
                yield "; ".join(map(str, of_line))
        windows = self._plan.read_windows() or Windows()
        alongside_s = median(update.forward_s for update in self._measured) if self._measured else 0.0
        if windows.forward_s > 0 and alongside_s > 0:
            yield (
                f"forward took {seconds(alongside_s)} alongside updates and {seconds(windows.forward_s)} without: "
                f"{alongside_s / windows.forward_s - 1:+.0%} ({windows.slowdown})"
            )
        yield from self._plan.description

    def close(self) -> None:
        """Log the summary at the end of training, unless nothing was updated; later calls do nothing."""
        if self._open_in_process != os.getpid():
            return
        self._open_in_process = None
        atexit.unregister(self.close)
        if self.updates:
            log.info("\n  ".join(self._summary()))
        self._call_sinks(lambda sink: sink.close(self))

    def _call_sinks(self, call: Callable[[ReportSink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:  # noqa: BLE001
                self._sinks.remove(sink)
                log.warn(
                    f"{sink.name}: the update cannot be reported there: {type(error).__name__}: {error}. "
                    f"This report is disabled now; training continues."
                )


class ProgressLine(ReportSink):
    """A sink that logs one line about an update that is due."""

    name = "deep_optimizer_states.log_every"

    def __init__(self) -> None:
        self._exposed_s: deque[float] = deque(maxlen=COMPARED_UPDATES)

    def updated(self, record: UpdateRecord, reporter: UpdateReporter) -> None:
        self._exposed_s.append(seconds_of(Phase.EXPOSED, record.phases))
        if not record.is_due:
            return
        numbers = record.numbers
        rates = (
            ("", numbers["params_per_s"], params_per_second),
            ("h2d=", numbers["h2d_bytes_per_s"], gigabytes_per_second),
            ("d2h=", numbers["d2h_bytes_per_s"], gigabytes_per_second),
        )
        parts = [
            f"step={record.step}",
            f"update exposed={seconds(numbers['exposed_s'])} (median of {len(self._exposed_s)}: "
            f"{seconds(median(self._exposed_s))})",
            f"hidden={seconds(numbers['hidden_s'])}",
            *(f"{name}{unit(rate)}" for name, rate, unit in rates if rate is not None),
            f"CPU Adam={seconds(numbers['cpu_adam_s'])}",
            f"GPU share={percent(numbers['gpu_share'])}",
        ]
        log.info(", ".join(parts))
        self._exposed_s.clear()


Event = tuple[str, float, int]
"""A name, a value, and the number of samples so far, the axis of DeepSpeed's own events."""


class MonitorEvents(ReportSink):
    """A sink for DeepSpeed's monitor: the numbers of every update, and predictions with the line of the log."""

    name = "monitor"

    def __init__(self, write: Callable[[Sequence[Event]], None]) -> None:
        self._write = write

    def updated(self, record: UpdateRecord, reporter: UpdateReporter) -> None:
        values: dict[str, float] = {}
        for name, value in record.numbers.items():
            if value is not None:
                values[name.replace("bytes", "gb")] = value / GB if "bytes" in name else value
        # A prediction is a simulation, too slow for every step.
        for row in reporter.comparison() if record.is_due else []:
            if row.name in (UPDATE, EXPOSED):
                values[f"predicted_{row.name}_s"] = row.predicted_s
                if row.error is not None:
                    values[f"predicted_{row.name}_error"] = row.error
        self._write([(f"Train/Update/{name}", value, record.samples) for name, value in values.items()])


class SlowCpu(ReportSink):
    """A sink that logs once that updates on the CPU run far below the profile. The plan does not follow them."""

    name = "the check of CPU updates"

    def __init__(self) -> None:
        self._was_logged = False

    def updated(self, record: UpdateRecord, reporter: UpdateReporter) -> None:
        if self._was_logged or reporter.updates % EVERY_UPDATES or reporter.compared_updates < EVERY_UPDATES // 2:
            return
        for row in reporter.comparison():
            if row.name == ActionKind.CPU_STEP.value and row.measured_s > SLOW * row.predicted_s:
                self._was_logged = True
                log.warn_this_rank(
                    f"CPU updates run at {row.predicted_s / row.measured_s:.2f} of the profile, and should be near 1: "
                    f"{seconds(row.measured_s)} per update instead of {seconds(row.predicted_s)} (median of "
                    f"{reporter.compared_updates} updates). Other processes or ranks may use the cores of this rank: "
                    f'keep "bind_cores" enabled. If the machine has changed, measure a new profile: '
                    f"deep-opt-states profile"
                )
