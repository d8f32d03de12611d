"""Predict an iteration on an EMULATED machine, by the same simulation as for a real one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.emulated.run import EmulatedRun
from perf_model.prediction.cost import CostModel
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import NO_WINDOWS, simulate
from perf_model.schedule.lowering import serial_schedule
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, place_all
from perf_model.training_run.micro_batch import GradientPath

SMALLEST_EXPOSED = 0.05
"""The share of stock's update below which an exposed time is negligible."""


@dataclass(frozen=True, kw_only=True)
class PredictedArm:
    """The predicted emulated seconds of one arm.

    They cover its update, the part that the model waits for, the wait for the copies of gradients after backward, and
    the iteration.
    """

    update_s: float
    exposed_s: float
    gradients_s: float
    iteration_s: float


def predict(
    run: EmulatedRun,
    numels: list[int],
    plan: UpdatePlan | None,
    windows: Windows = NO_WINDOWS,
) -> PredictedArm:
    """Return the prediction of stock for sub-groups of ``numels`` parameters of the small model, or of a plan.

    ``plan`` is the plugin's for the units of the small model, or None for stock. ``windows`` are the emulated seconds
    of backward and of the next forward that the update may overlap with.
    """
    if plan is None:
        workload = run.workload(numels)
        plan = UpdatePlan(workload=workload, placements=place_all(workload, Placement.CPU), num_slots=1)
        update_s = simulate(
            serial_schedule(plan.placements), workload, CostModel.for_stock(run.profile, run.widths)
        ).end_s
        slowed_s = 0.0
        exposed_s, gradients = update_s, GradientPath.for_stock(plan, run.widths)
    else:
        workload = run.workload([unit.numel for unit in plan.workload.units])
        plan = replace(plan, workload=workload)
        backward_s, forward_s = windows.backward_s / run.slowdown, windows.forward_s / run.slowdown
        windows = replace(windows, backward_s=backward_s, forward_s=forward_s)
        cost = CostModel.from_profile(run.profile, run.widths)
        timeline = simulate(plan.schedule, workload, cost, windows)
        update_s, (exposed_s, slowed_s) = timeline.end_s, windows.added_time(timeline, workload, cost)
        gradients = GradientPath.for_plan(plan)
    backward_s = _backward_s(run, gradients.seconds(run.profile)[0])
    return PredictedArm(
        update_s=run.slowdown * update_s,
        exposed_s=run.slowdown * exposed_s,
        gradients_s=run.slowdown * (backward_s - run.backward_s),
        iteration_s=run.slowdown * (run.forward_s + slowed_s + backward_s + exposed_s),
    )


def windows_of(run: EmulatedRun) -> Windows:
    """Return the emulated seconds of backward and forward that an update of ``run`` may overlap with.

    Prefetching begins when the first bucket of gradients is reduced.
    """
    return Windows(
        backward_s=run.slowdown * (1 - run.share_of_bucket) * run.backward_s,
        forward_s=run.slowdown * run.forward_s,
        slowdown=run.forward_slowdown,
    )


def is_negligible(predicted_s: float, exposed_s: Sequence[float], stock_update_s: Sequence[float]) -> bool:
    """Return whether an exposed time is negligible, as predicted and as measured.

    The relative error of such a prediction means nothing, since the host's Python code may take all of the time.
    """
    return max(predicted_s, median(exposed_s)) < SMALLEST_EXPOSED * median(stock_update_s)


def _backward_s(run: EmulatedRun, copies_s: float) -> float:
    """Return the seconds of backward, with copies of the gradients that take ``copies_s``.

    The first bucket is copied when it is full, and the last one after backward.
    """
    bucket = run.share_of_bucket
    return max(run.backward_s + bucket * copies_s, bucket * run.backward_s + copies_s)
