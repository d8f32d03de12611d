"""How good are the plans, and how long does planning take?

Known machines and models are planned for, in windows of backward and forward. Each plan is compared with simulated
annealing (``planner/annealing.py``) that starts from it, and its update with the lower bound of all the work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from benchmarks.harness.charts import Bars
from benchmarks.harness.rows import SIMULATED, Row
from benchmarks.planner.annealing import Annealed, anneal_for
from benchmarks.planner.window_settings import COUNT, WindowSetting, window_settings
from perf_model.planner import UNIT_SIZES, PlannedUpdate, plan_units
from perf_model.prediction.work_bound import work_bound

ANNEALING_S = 10.0
"""The CPU seconds of annealing of each plan."""

CLOSE = 1.01
"""A plan is close if its iteration takes at most this multiple of the one that annealing finds."""

REPEATS = 3
"""How often each setting is planned for; the least time counts, because other load on the machine adds to it."""

LARGEST_RATIO = "largest ratio of the iteration to annealing"
LONGEST_PLANNING = "longest planning time (CPU), all sizes"

CHART = Bars("iteration / after annealing", "update / work bound", "planning time (CPU), all sizes")


@dataclass(frozen=True, kw_only=True)
class WindowedPlan:
    """The plan of one setting, its lower bound, and the CPU seconds of planning with all unit sizes."""

    setting: WindowSetting
    planned: PlannedUpdate
    bound_s: float
    planning_s: float

    def ratio_to(self, annealed: Annealed) -> float:
        """Return the iteration as a multiple of the annealed one."""
        windows = self.setting.windows
        model_s = windows.backward_s + windows.forward_s
        return (model_s + self.planned.exposed_s) / (model_s + annealed.exposed_s)


def plan_in_windows(setting: WindowSetting) -> WindowedPlan:
    """Plan ``setting`` with all unit sizes."""
    cost, budgets, windows, setup = setting.cost, setting.budgets, setting.windows, setting.job.setup
    times_s = []
    for _ in range(REPEATS):
        start_s = time.process_time()
        _, planned = plan_units(setting.workload, UNIT_SIZES, cost, budgets, windows, setup)
        times_s.append(time.process_time() - start_s)
    bound_s = work_bound(planned.plan.workload, cost, budgets.gpu_bytes, setup).seconds
    return WindowedPlan(setting=setting, planned=planned, bound_s=bound_s, planning_s=min(times_s))


def anneal_plan(plan: WindowedPlan, seconds: float) -> Annealed:
    """Anneal ``plan`` for ``seconds`` of CPU time."""
    return anneal_for(seconds, plan.planned.plan, plan.setting)


def measure(*, quick: bool) -> Iterator[Row]:
    """Yield the quality of the plans and the planning times."""
    count, annealing_s = (2, 0.1) if quick else (COUNT, ANNEALING_S)
    # Planning is timed before the processes of annealing start, one setting at a time.
    plans = [plan_in_windows(setting) for setting in window_settings(count)]
    ratios = []
    with ProcessPoolExecutor(os.cpu_count()) as processes:
        for plan, annealed in zip(plans, processes.map(partial(anneal_plan, seconds=annealing_s), plans), strict=True):
            ratios.append(plan.ratio_to(annealed))
            yield from _rows_of(plan, annealed, annealing_s)
    together = partial(Row, variant="plans in windows", setting={"machines": len(plans)})
    yield together(quantity="iteration / after annealing", unit="times", samples=ratios)
    yield together(quantity=LARGEST_RATIO, unit="times", samples=[max(ratios)])
    close = sum(ratio <= CLOSE for ratio in ratios)
    yield together(quantity="iteration at most 1% above annealing", value=f"{close} of {len(plans)}")
    to_bound = [plan.planned.update_s / plan.bound_s for plan in plans]
    yield together(quantity="update / work bound", unit="times", samples=to_bound)
    times_s = [plan.planning_s for plan in plans]
    yield together(quantity="planning time (CPU), all sizes", unit="s", samples=times_s)
    yield together(quantity=LONGEST_PLANNING, unit="s", samples=[max(times_s)])
    yield together(quantity="no plan beats the bound", value=min(to_bound) >= 1 - 1e-6, claimed=True)


def _rows_of(plan: WindowedPlan, annealed: Annealed, annealing_s: float) -> Iterator[Row]:
    row = partial(Row, variant=str(plan.setting), setting={"annealing": f"{annealing_s:g} s"})
    for quantity, seconds in (
        (f"{SIMULATED} exposed", plan.planned.exposed_s),
        (f"{SIMULATED} exposed after annealing", annealed.exposed_s),
        (f"{SIMULATED} update", plan.planned.update_s),
        (f"{SIMULATED} lower bound of the update", plan.bound_s),
        ("planning time (CPU), all sizes", plan.planning_s),
    ):
        yield row(quantity=quantity, unit="s", samples=[seconds])
    for quantity, number in (
        ("simulations", plan.planned.simulations),
        ("simulations of annealing", annealed.simulations),
    ):
        yield row(quantity=quantity, unit="plans", samples=[number])
