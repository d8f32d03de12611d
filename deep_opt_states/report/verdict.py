"""State in a few sentences how much the update costs, which resource limits it, and whether the plugin gains."""

from __future__ import annotations

from collections.abc import Iterator

from deep_opt_states.report.folder import RecordedRun
from perf_model.prediction.timeline import Timeline
from perf_model.schedule.action import Lane
from perf_model.schedule.placement import Placement
from perf_model.units import percent, seconds

LITTLE_GAIN = 0.95
"""The ratio of the cost to the predicted one of stock above which little is gained: predictions are no better."""

_RESOURCES = {
    Lane.H2D: "The link to the accelerator",
    Lane.COMPUTE: "The accelerator",
    Lane.D2H: "The link to host memory",
    Lane.CPU: "The CPU with its memory",
    Lane.PUBLISH: "The copy of parameters to the accelerator",
    Lane.READ: "Reading the disk",
    Lane.WRITE: "Writing to the disk",
}


def label_of(run: RecordedRun) -> str:
    """Return the label of all seconds of the run: "EMULATED", "SIMULATED", or "" if a real machine was measured."""
    return next((label for label in ("EMULATED", "SIMULATED") if label in run.info.accelerator), "")


def verdict(run: RecordedRun) -> str:
    """Return the verdict, which begins with the label of its seconds."""
    return " ".join(filter(None, [f"{label}:" if (label := label_of(run)) else "", *_sentences(run)]))


def _sentences(run: RecordedRun) -> Iterator[str]:
    cost_s, iteration_s = run.median("cost_s"), run.median("iteration_s")
    if cost_s is None:
        yield "No update was recorded."
        return
    if iteration_s is None:
        yield f"The update costs {seconds(cost_s)}; no iteration was recorded."
    else:
        share = percent(cost_s / iteration_s)
        yield f"The update costs {share} of an iteration: {seconds(cost_s)} of {seconds(iteration_s)}."
    if run.measured is not None:
        yield _limit(run.measured[0])
    if (stock_s := run.stock_s) is not None:
        gain = "little or nothing is gained here" if cost_s > LITTLE_GAIN * stock_s else "the plugin saves time"
        yield f"Stock's update is predicted (SIMULATED from the profile) to cost at least {seconds(stock_s)}: {gain}."
    if all(placement is Placement.CPU for placement in run.info.plan.placements):
        yield "The CPU updates every unit, as with stock."


def _limit(timeline: Timeline) -> str:
    """Return the sentence about the lane that is busy for the largest share of the update."""
    shares = {lane: timeline.busy_s(lane) / max(timeline.active_s, 1e-9) for lane in timeline.lanes}
    busiest = max(shares, key=lambda lane: shares[lane])
    if shares[busiest] < 0.5:
        return f"Nothing is busy for more than {percent(shares[busiest])} of the update: actions wait for one another."
    return f"{_RESOURCES[busiest]} limits the update, busy for {percent(shares[busiest])} of it."
