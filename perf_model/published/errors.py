"""Define what is compared of each run, and summarize relative errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from perf_model.published.runs import MeasuredRun

QUANTITIES = ("forward", "backward", "update", "iteration")
"""The measured times of a run that are compared with predictions."""


def measured_s_of(run: MeasuredRun, quantity: str) -> float | None:
    """Return the measured seconds of one of ``QUANTITIES``, or None if the file lacks them."""
    seconds = {
        "forward": run.forward_s,
        "backward": run.backward_s,
        "update": run.measured_s,
        "iteration": run.iteration_s,
    }
    return seconds[quantity]


class ErrorSummary(NamedTuple):
    """The number of runs, and the median and 90th percentile of their absolute relative errors."""

    runs: int
    median: float
    p90: float

    @classmethod
    def from_errors(cls, errors: Iterable[float]) -> ErrorSummary | None:
        """Return the summary of relative errors, or None if there are none."""
        absolute = np.abs(list(errors))
        if not len(absolute):
            return None
        return cls(len(absolute), float(np.median(absolute)), float(np.percentile(absolute, 90)))
