"""A line in the log, beside the one that DeepSpeed prints every ``steps_per_print``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median

from deep_opt_states.report.record import UpdateRecord
from deep_opt_states.report.reporter import UpdateReport
from perf_model.units import gigabytes_a_second, params_a_second, percent, seconds

MEDIAN_OF_UPDATES = 100
"""At most: of those since the last line."""


class ProgressLine:
    name = '"steps_per_print"'

    def __init__(self, every_n_steps: float, log: Callable[[str], None]) -> None:
        self._every_n_steps = every_n_steps
        self._log = log
        self._exposed_s: deque[float] = deque(maxlen=MEDIAN_OF_UPDATES)

    def updated(self, record: UpdateRecord, report: UpdateReport) -> None:
        self._exposed_s.append(record.exposed_s)
        if not record.is_due(self._every_n_steps):
            return
        its = record.numbers
        parts = [
            f"step={record.progress.step}",
            f"update exposed={seconds(its.exposed_s)} (median of {len(self._exposed_s)}: "
            f"{seconds(median(self._exposed_s))})",
            f"hidden={seconds(its.hidden_s)}",
        ]
        if its.params_per_s is not None:
            parts.append(params_a_second(its.params_per_s))
        for direction, rate in (("h2d", its.h2d_bytes_per_s), ("d2h", its.d2h_bytes_per_s)):
            if rate is not None:
                parts.append(f"{direction}={gigabytes_a_second(rate)}")
        parts += [f"CPU Adam={seconds(its.cpu_adam_s)}", f"GPU share={percent(its.gpu_share)}"]
        self._log(", ".join(parts))
        self._exposed_s.clear()

    def close(self, report: UpdateReport) -> None:
        """Every line is said when it is due."""
