"""How good are the plans, and how long does planning take, on synthetic nodes that have not been measured?

The update of a plan is compared with a lower bound of all plans: the work bound with the unavoidable fill and drain
(``planner/fill_and_drain.py``). With up to ten units it is compared with every feasible plan. The benchmark fails
if a plan is faster than its bound, or slower than another feasible plan. These updates are all exposed.

In windows of backward and forward, the plans of known machines and models are compared with annealing
(``planner/annealing.py``) that starts from them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from benchmarks.harness.charts import Bars
from benchmarks.harness.rows import Row
from benchmarks.planner.fill_and_drain import bound_with_fill_and_drain
from benchmarks.planner.synthetic_nodes import SyntheticNode, draw_nodes
from benchmarks.planner.window_rows import rows_of_windows
from benchmarks.planner.window_settings import COUNT
from perf_model.prediction.memory import memory_of
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import Simulator
from perf_model.schedule.order import longest_in_the_middle
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from perf_model.search.capacity import ResidentCapacity
from perf_model.search.placement_search import EXHAUSTIVE_UP_TO
from perf_model.search.planner import plan_updates
from perf_model.search.starting_points import MAX_SLOTS
from perf_model.search.unit_sizes import MAX_USEFUL_UNITS, UNIT_SIZES, plan_units

ROUNDING = 1e-9
"""Relative difference that rounding can explain."""

CHART = Bars("update / bound with fill and drain", "update / work bound", "planning time (CPU)")


@dataclass(frozen=True, kw_only=True)
class PlanQuality:
    """How close the plan of one node is to its bounds.

    ``ratio`` is its update time divided by the bound with fill and drain, ``ratio_to_work`` divided by the work bound.
    """

    node: str
    units: int
    ratio: float
    ratio_to_work: float


def compare_with_bounds(node: SyntheticNode) -> PlanQuality:
    """Plan ``node`` with the unit size that exposes the least time, and compare the plan with its bounds."""
    cost, budgets = node.cost, node.budgets
    _, planned = plan_units(node.workload, UNIT_SIZES, cost, budgets, Windows(), node.setup)
    workload = planned.plan.workload
    bound = bound_with_fill_and_drain(
        workload, cost, ResidentCapacity.from_gpu_bytes(workload, budgets.gpu_bytes, node.setup)
    )
    return PlanQuality(
        node=str(node),
        units=len(workload.units),
        ratio=planned.update_s / bound.seconds,
        ratio_to_work=planned.ratio_to_bound,
    )


def planning_times_s(node: SyntheticNode) -> list[tuple[int, float]]:
    """Return for each unit size the number of units and the CPU seconds of planning them."""
    times = []
    for size in UNIT_SIZES:
        workload = node.workload(size)
        if len(workload.units) <= MAX_USEFUL_UNITS:
            start_s = time.process_time()
            plan_updates(workload, node.cost, node.budgets, setup=node.setup)
            times.append((len(workload.units), time.process_time() - start_s))
    return times


def excess_over_best_plan(node: SyntheticNode) -> float | None:
    """Return the plan's exposed time divided by that of the best of all feasible plans, minus 1.

    The unit size is the one that gives the most units, up to ten. Return None if all sizes give more.
    """
    few = [workload for workload in map(node.workload, UNIT_SIZES) if len(workload.units) <= EXHAUSTIVE_UP_TO]
    if not few:
        return None
    workload = max(few, key=lambda candidate: len(candidate.units))
    simulator = Simulator(node.cost)
    least_s = min(simulator.run(plan.schedule, workload).end_s for plan in _feasible_plans(workload, node))
    return plan_updates(workload, node.cost, node.budgets, setup=node.setup).exposed_s / least_s - 1


def _feasible_plans(workload: Workload, node: SyntheticNode) -> Iterator[UpdatePlan]:
    """Yield every plan that fits into the node's memory, in the order of the workload and longest in the middle."""
    for placements in product(Placement, repeat=len(workload.units)):
        order = longest_in_the_middle(workload, placements)
        for num_slots in range(1, max(1, min(MAX_SLOTS, placements.count(Placement.STREAMED))) + 1):
            plan = UpdatePlan(workload=workload, placements=placements, num_slots=num_slots)
            if not node.budgets.missing(memory_of(plan, node.setup)):
                yield plan
                yield replace(plan, order=order)


def measure(*, quick: bool) -> Iterator[Row]:
    """Yield the quality of the plans and the planning times."""
    yield from rows_of_nodes(*((8, 2, 1) if quick else (540, 40, 8)), seed=0)
    yield from rows_of_windows(*((2, 0.1) if quick else (COUNT,)))


def rows_of_nodes(count: int, timed: int, exhaustive: int, seed: int) -> Iterator[Row]:
    """Yield the rows of ``count`` nodes, drawn with ``seed`` from the grid's 4,320.

    Planning is timed on the first ``timed`` nodes. The plans of ``exhaustive`` nodes are compared with every feasible
    plan.
    """
    drawn = draw_nodes(count, seed)
    with ProcessPoolExecutor(os.cpu_count()) as processes:
        qualities = list(processes.map(compare_with_bounds, drawn, chunksize=4))
    setting = {"machines": count, "seed": seed}
    plans = partial(Row, variant="plans", unit="times", setting=setting)
    yield plans(quantity="update / bound with fill and drain", samples=[quality.ratio for quality in qualities])
    yield plans(quantity="update / work bound", samples=[quality.ratio_to_work for quality in qualities])
    worst = max(qualities, key=lambda quality: quality.ratio)
    yield plans(quantity="largest ratio to the bound", samples=[worst.ratio])
    yield plans(quantity="node with the largest ratio", value=f"{worst.node}; {worst.units} units")
    none_beats_bound = all(quality.ratio >= 1 - ROUNDING for quality in qualities)
    yield plans(quantity="no plan beats the bound", value=none_beats_bound, claimed=True)
    excesses = _excesses(drawn, exhaustive)
    best = all(excess <= ROUNDING for excess in excesses)
    yield plans(quantity=f"none of {len(excesses)} is slower than another feasible plan", value=best, claimed=True)
    # Planning is timed after the processes have ended, one node at a time, since other load would slow it down.
    times: dict[str, list[float]] = {}
    for number, seconds in sorted(pair for node in drawn[:timed] for pair in planning_times_s(node)):
        name = next(f"up to {most} units" for most in (10, 100, 1000) if number <= most)
        times.setdefault(name, []).append(seconds)
    for name, samples in times.items():
        yield Row(variant=name, quantity="planning time (CPU)", unit="s", samples=samples, setting=setting)


def _excesses(drawn: Iterable[SyntheticNode], count: int) -> list[float]:
    """Return the excess of the first ``count`` nodes that can have few enough units."""
    found: list[float] = []
    for node in drawn:
        if len(found) == count:
            break
        excess = excess_over_best_plan(node)
        if excess is not None:
            found.append(excess)
    return found
