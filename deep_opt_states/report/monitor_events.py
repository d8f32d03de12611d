"""Write events of each update to DeepSpeed's monitor: TensorBoard, W&B, Comet, CSV files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deep_opt_states.report.comparison import EXPOSED, UPDATE
from deep_opt_states.report.record import Numbers, UpdateRecord
from deep_opt_states.report.reporter import UpdateReporter
from perf_model.units import GB

Event = tuple[str, float, int]
"""A name, a value, and the number of samples that training had seen, which is the axis of DeepSpeed's own events."""

PREFIX = "Train/Update/"


class MonitorEvents:
    """A sink that passes events to ``write``: the numbers of every update, and predictions when DeepSpeed prints."""

    name = "monitor"

    def __init__(self, every_n_steps: float | None, write: Callable[[Sequence[Event]], None]) -> None:
        self._every_n_steps = every_n_steps
        self._write = write

    def updated(self, record: UpdateRecord, reporter: UpdateReporter) -> None:
        """Write the events of one update."""
        values = _values(record.numbers)
        # A prediction is a simulation, which is too slow for every step.
        if record.is_due(self._every_n_steps):
            rows = {row.name: row for row in reporter.comparison()}
            for row_name, name in ((UPDATE, "update"), (EXPOSED, "exposed")):
                if row_name in rows:
                    values[f"predicted_{name}_s"] = rows[row_name].predicted_s
                    values[f"predicted_{name}_error"] = rows[row_name].error
        self._write([(f"{PREFIX}{name}", value, record.counts.samples) for name, value in values.items()])

    def close(self, reporter: UpdateReporter) -> None:
        """Do nothing: DeepSpeed closes its monitor."""


def _values(numbers: Numbers) -> dict[str, float]:
    values: dict[str, float | None] = {
        "exposed_s": numbers.exposed_s,
        "hidden_s": numbers.hidden_s,
        "update_s": numbers.update_s,
        "cpu_adam_s": numbers.cpu_adam_s,
        "params_per_s": numbers.params_per_s,
        "h2d_gb_per_s": None if numbers.h2d_bytes_per_s is None else numbers.h2d_bytes_per_s / GB,
        "d2h_gb_per_s": None if numbers.d2h_bytes_per_s is None else numbers.d2h_bytes_per_s / GB,
        "gpu_share": numbers.gpu_share,
    }
    return {name: value for name, value in values.items() if value is not None}
