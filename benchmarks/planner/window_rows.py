"""Compare plans in windows of backward and forward with annealing that starts from them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from benchmarks.harness.rows import Row
from benchmarks.planner.annealing import anneal_for
from benchmarks.planner.window_settings import WindowSetting, window_settings
from perf_model.search.unit_sizes import UNIT_SIZES, plan_units

LONG_S, SHORT_S = 30.0, 5.0
"""The CPU seconds of annealing: of a few settings at equal distances, and of the others."""

LONG_COUNT = 8
"""The number of settings that are annealed for long."""

CLOSE = 1.03
"""A plan is close if it exposes at most this multiple of what annealing finds."""


@dataclass(frozen=True, kw_only=True)
class WindowedPlan:
    """The plan of one setting, compared with annealing for ``annealing_s`` seconds and with the lower bound."""

    setting: WindowSetting
    annealing_s: float
    exposed_s: float
    annealed_s: float
    bound_s: float
    simulations: int
    annealing_simulations: int
    planning_s: float


def compare_with_annealing(setting: WindowSetting, annealing_s: float) -> WindowedPlan:
    """Plan ``setting`` with all unit sizes, and anneal the plan."""
    cost, budgets, windows = setting.cost, setting.budgets, setting.windows
    start_s = time.process_time()
    _, planned = plan_units(setting.workload, UNIT_SIZES, cost, budgets, windows, setting.job.setup)
    planning_s = time.process_time() - start_s
    annealed = anneal_for(annealing_s, planned.plan, cost, budgets, windows, setting.job.setup)
    return WindowedPlan(
        setting=setting,
        annealing_s=annealing_s,
        exposed_s=planned.exposed_s,
        annealed_s=annealed.exposed_s,
        bound_s=planned.exposed_bound.seconds,
        simulations=planned.simulations,
        annealing_simulations=annealed.simulations,
        planning_s=planning_s,
    )


def rows_of_windows(count: int, long_s: float = LONG_S, short_s: float = SHORT_S) -> Iterator[Row]:
    """Yield the rows of ``count`` settings, one after another, and those of all of them together."""
    settings = window_settings(count)
    long_ones = {index * len(settings) // LONG_COUNT for index in range(LONG_COUNT)}
    plans = []
    for index, setting in enumerate(settings):
        plan = compare_with_annealing(setting, long_s if index in long_ones else short_s)
        plans.append(plan)
        yield from _rows_of(plan)
    together = partial(Row, variant="plans in windows", setting={"machines": len(plans)})
    ratios = [plan.exposed_s / plan.annealed_s for plan in plans]
    yield together(quantity="exposed / after annealing", unit="times", samples=ratios)
    yield together(quantity="largest ratio to annealing", unit="times", samples=[max(ratios)])
    close = sum(ratio <= CLOSE for ratio in ratios)
    yield together(quantity="at most 3% above annealing", value=f"{close} of {len(plans)}")
    times_s = [plan.planning_s for plan in plans]
    yield together(quantity="planning time (CPU), all sizes", unit="s", samples=times_s)
    holds = all(plan.exposed_s >= plan.bound_s * (1 - 1e-6) for plan in plans)
    yield together(quantity="no plan beats the bound", value=holds, claimed=True)


def _rows_of(plan: WindowedPlan) -> Iterator[Row]:
    setting = {"annealing": f"{plan.annealing_s:g} s"}
    for quantity, seconds in (
        ("exposed", plan.exposed_s),
        ("after annealing", plan.annealed_s),
        ("lower bound", plan.bound_s),
        ("planning time (CPU), all sizes", plan.planning_s),
    ):
        yield Row(variant=str(plan.setting), quantity=quantity, unit="s", samples=[seconds], setting=setting)
    for quantity, number in (
        ("simulations", plan.simulations),
        ("simulations of annealing", plan.annealing_simulations),
    ):
        yield Row(variant=str(plan.setting), quantity=quantity, unit="plans", samples=[number], setting=setting)
