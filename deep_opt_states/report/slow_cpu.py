"""Log one line if this rank's updates on the CPU take much longer than the profile predicts."""

from __future__ import annotations

from collections.abc import Callable

from deep_opt_states.report.line import UpdateReporter
from deep_opt_states.report.record import UpdateRecord
from perf_model.schedule.action import ActionKind
from perf_model.units import seconds

SLOW = 2.0
"""The measured over the predicted seconds above which the line is logged. Predictions are within a few tens of percent.
"""

EVERY_UPDATES = 25
"""The updates between two comparisons, which cost a simulation each."""


class SlowCpu:
    """A sink that logs once that updates on the CPU run far below the profile. The plan does not follow them."""

    name = "the check of CPU updates"

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._updates = 0
        self._has_logged = False

    def updated(self, record: UpdateRecord, reporter: UpdateReporter) -> None:
        """Compare the medians of the last updates with the prediction, every ``EVERY_UPDATES`` updates."""
        self._updates += 1
        if self._has_logged or self._updates % EVERY_UPDATES or reporter.compared_updates < EVERY_UPDATES // 2:
            return
        for row in reporter.comparison():
            if row.name == ActionKind.CPU_STEP.value and row.measured_s > SLOW * row.predicted_s:
                self._has_logged = True
                self._log(
                    f"CPU updates run at {row.predicted_s / row.measured_s:.2f} of the profile, and should be near 1: "
                    f"{seconds(row.measured_s)} per update instead of {seconds(row.predicted_s)} (median of "
                    f"{reporter.compared_updates} updates). Other processes or ranks may use the cores of this rank: "
                    f'keep "bind_cores" enabled. If the machine has changed, measure a new profile: '
                    f"deep-opt-states profile"
                )

    def close(self, reporter: UpdateReporter) -> None:
        """Do nothing: the line was logged when it was due."""
