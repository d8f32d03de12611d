"""Events for DeepSpeed's monitor: TensorBoard, W&B, Comet, CSV files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deep_opt_states.report.comparison import EXPOSED, UPDATE
from deep_opt_states.report.record import Numbers, UpdateRecord
from deep_opt_states.report.reporter import UpdateReport
from perf_model.units import GB

Event = tuple[str, float, int]
"""A name, a value, and the samples that training had seen: the axis of DeepSpeed's own events."""

PREFIX = "Train/Update/"


class MonitorEvents:
    """``write`` takes them; measured ones of every update, predictions when DeepSpeed prints."""

    name = "monitor"

    def __init__(self, every_n_steps: float | None, write: Callable[[Sequence[Event]], None]) -> None:
        self._every_n_steps = every_n_steps
        self._write = write

    def updated(self, record: UpdateRecord, report: UpdateReport) -> None:
        values = _measured(record.numbers)
        # A prediction is a simulation, which takes its time.
        if record.is_due(self._every_n_steps):
            rows = {row.what: row for row in report.compared()}
            for what, name in ((UPDATE, "update"), (EXPOSED, "exposed")):
                if what in rows:
                    values[f"predicted_{name}_s"] = rows[what].predicted_s
                    values[f"predicted_{name}_error"] = rows[what].error
        self._write([(f"{PREFIX}{name}", value, record.progress.samples) for name, value in values.items()])

    def close(self, report: UpdateReport) -> None:
        """The monitor is DeepSpeed's."""


def _measured(its: Numbers) -> dict[str, float]:
    values: dict[str, float | None] = {
        "exposed_s": its.exposed_s,
        "hidden_s": its.hidden_s,
        "update_s": its.update_s,
        "cpu_adam_s": its.cpu_adam_s,
        "params_per_s": its.params_per_s,
        "h2d_gb_per_s": None if its.h2d_bytes_per_s is None else its.h2d_bytes_per_s / GB,
        "d2h_gb_per_s": None if its.d2h_bytes_per_s is None else its.d2h_bytes_per_s / GB,
        "gpu_share": its.gpu_share,
    }
    return {name: value for name, value in values.items() if value is not None}
