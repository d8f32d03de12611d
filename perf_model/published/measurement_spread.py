"""Measure how much the published runs differ by themselves: no model of them can be nearer than that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perf_model.published.baselines import on_line
from perf_model.published.errors import ErrorSummary
from perf_model.published.runs import MeasuredRun


@dataclass(frozen=True, kw_only=True)
class MeasurementSpread:
    """The spread of measured updates; each part is None if the file has no runs for it.

    ``repeated`` is the distance of interleaved runs from the median of those with the same setting on the same machine,
    most of them in different sweeps. ``around_line`` is the distance of the predicted strides from a line in 1/stride
    that is fitted to all strides of their sweep, the predicted ones included.
    """

    repeated: ErrorSummary | None
    around_line: ErrorSummary | None

    @classmethod
    def from_runs(
        cls, runs: Sequence[MeasuredRun], sweeps: Iterable[Mapping[int, MeasuredRun]], predicted: set[int]
    ) -> MeasurementSpread:
        """Return the spread of ``runs``; ``sweeps`` and ``predicted`` have positions in them."""
        settings: dict[Hashable, list[float]] = defaultdict(list)
        for run in runs:
            if run.setting.update_stride is not None:
                settings[run.machine, run.tp, run.trained].append(run.measured_s)
        around_line = []
        for sweep in sweeps:
            line = on_line("update", sweep, sweep)
            around_line += [line[position] / runs[position].measured_s - 1 for position in predicted & set(line)]
        return cls(
            repeated=ErrorSummary.from_errors(
                measured_s / float(np.median(repeats)) - 1
                for repeats in settings.values()
                if len(repeats) > 1
                for measured_s in repeats
            ),
            around_line=ErrorSummary.from_errors(around_line),
        )

    def to_json_dict(self) -> dict[str, object]:
        """Return the spread as it is written to JSON."""
        parts = {"repeated_settings": self.repeated, "line_through_all_strides": self.around_line}
        return {name: None if found is None else found._asdict() for name, found in parts.items()}
