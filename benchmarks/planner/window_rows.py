"""Compare plans in windows of backward and forward with annealing that starts from them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from benchmarks.harness.rows import SIMULATED, Row
from benchmarks.planner.annealing import Annealed, anneal_for
from benchmarks.planner.window_settings import WindowSetting, window_settings
from perf_model.search.planner import PlannedUpdate
from perf_model.search.unit_sizes import UNIT_SIZES, plan_units

ANNEALING_S = 30.0
"""The CPU seconds of annealing of each plan."""

CLOSE = 1.03
"""A plan is close if it exposes at most this multiple of what annealing finds."""

REPEATS = 3
"""How often each setting is planned for; the least time counts, because other load on the machine adds to it."""


@dataclass(frozen=True, kw_only=True)
class WindowedPlan:
    """The plan of one setting, and the CPU seconds of planning with all unit sizes."""

    setting: WindowSetting
    planned: PlannedUpdate
    planning_s: float


def plan_in_windows(setting: WindowSetting) -> WindowedPlan:
    """Plan ``setting`` with all unit sizes."""
    cost, budgets, windows, setup = setting.cost, setting.budgets, setting.windows, setting.job.setup
    times_s = []
    for _ in range(REPEATS):
        start_s = time.process_time()
        _, planned = plan_units(setting.workload, UNIT_SIZES, cost, budgets, windows, setup)
        times_s.append(time.process_time() - start_s)
    return WindowedPlan(setting=setting, planned=planned, planning_s=min(times_s))


def anneal_plan(plan: WindowedPlan, seconds: float) -> Annealed:
    """Anneal ``plan`` for ``seconds`` of CPU time."""
    return anneal_for(seconds, plan.planned.plan, plan.setting)


def rows_of_windows(count: int, annealing_s: float = ANNEALING_S) -> Iterator[Row]:
    """Yield the rows of ``count`` settings, and those of all of them together."""
    # Planning is timed before the processes of annealing start, one setting at a time.
    plans = [plan_in_windows(setting) for setting in window_settings(count)]
    ratios = []
    with ProcessPoolExecutor(os.cpu_count()) as processes:
        for plan, annealed in zip(plans, processes.map(partial(anneal_plan, seconds=annealing_s), plans), strict=True):
            ratios.append(plan.planned.exposed_s / annealed.exposed_s)
            yield from _rows_of(plan, annealed, annealing_s)
    together = partial(Row, variant="plans in windows", setting={"machines": len(plans)})
    yield together(quantity="exposed / after annealing", unit="times", samples=ratios)
    yield together(quantity="largest ratio to annealing", unit="times", samples=[max(ratios)])
    close = sum(ratio <= CLOSE for ratio in ratios)
    yield together(quantity="at most 3% above annealing", value=f"{close} of {len(plans)}")
    times_s = [plan.planning_s for plan in plans]
    yield together(quantity="planning time (CPU), all sizes", unit="s", samples=times_s)
    yield together(quantity="longest planning time (CPU), all sizes", unit="s", samples=[max(times_s)])
    holds = all(plan.planned.exposed_s >= plan.planned.exposed_bound.seconds * (1 - 1e-6) for plan in plans)
    yield together(quantity="no plan beats the bound", value=holds, claimed=True)


def _rows_of(plan: WindowedPlan, annealed: Annealed, annealing_s: float) -> Iterator[Row]:
    row = partial(Row, variant=str(plan.setting), setting={"annealing": f"{annealing_s:g} s"})
    for quantity, seconds in (
        (f"{SIMULATED} exposed", plan.planned.exposed_s),
        (f"{SIMULATED} exposed after annealing", annealed.exposed_s),
        (f"{SIMULATED} lower bound", plan.planned.exposed_bound.seconds),
        ("planning time (CPU), all sizes", plan.planning_s),
    ):
        yield row(quantity=quantity, unit="s", samples=[seconds])
    for quantity, number in (
        ("simulations", plan.planned.simulations),
        ("simulations of annealing", annealed.simulations),
    ):
        yield row(quantity=quantity, unit="plans", samples=[number])
