"""Log one line about the update whenever DeepSpeed prints its own, every ``steps_per_print`` steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median

from deep_opt_states.report.record import UpdateRecord
from deep_opt_states.report.reporter import UpdateReporter
from perf_model.units import gigabytes_per_second, params_per_second, percent, seconds

MEDIAN_OF_UPDATES = 100
"""The largest number of updates since the last line that the median is taken of."""


class ProgressLine:
    """A sink that logs one line about the update at every step that is a multiple of ``every_n_steps``."""

    name = '"steps_per_print"'

    def __init__(self, every_n_steps: float, log: Callable[[str], None]) -> None:
        self._every_n_steps = every_n_steps
        self._log = log
        self._exposed_s: deque[float] = deque(maxlen=MEDIAN_OF_UPDATES)

    def updated(self, record: UpdateRecord, reporter: UpdateReporter) -> None:
        """Log the line if it is due."""
        self._exposed_s.append(record.exposed_s)
        if not record.is_due(self._every_n_steps):
            return
        numbers = record.numbers
        parts = [
            f"step={record.counts.step}",
            f"update exposed={seconds(numbers.exposed_s)} (median of {len(self._exposed_s)}: "
            f"{seconds(median(self._exposed_s))})",
            f"hidden={seconds(numbers.hidden_s)}",
        ]
        if numbers.params_per_s is not None:
            parts.append(params_per_second(numbers.params_per_s))
        for direction, rate in (("h2d", numbers.h2d_bytes_per_s), ("d2h", numbers.d2h_bytes_per_s)):
            if rate is not None:
                parts.append(f"{direction}={gigabytes_per_second(rate)}")
        parts += [f"CPU Adam={seconds(numbers.cpu_adam_s)}", f"GPU share={percent(numbers.gpu_share)}"]
        self._log(", ".join(parts))
        self._exposed_s.clear()

    def close(self, reporter: UpdateReporter) -> None:
        """Do nothing: every line was logged when it was due."""
