"""How good and how fast plans are, on machines that nobody measured.

A plan's update is compared with the least that any plan can take: the work bound with the unavoidable fill and drain
(``harness/fill_and_drain.py``). With up to ten sub-groups it is compared with every plan that fits. Ends with 1 if a
plan beats its bound, or is worse than another that fits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from benchmarks.harness.fill_and_drain import bound_with_fill_and_drain
from benchmarks.harness.picture import Bars
from benchmarks.harness.rows import Row
from benchmarks.harness.synthetic import Machine, machines
from perf_model.prediction.memory import memory_of
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import Simulator
from perf_model.schedule.order import rising_and_falling
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from perf_model.search.bounds import Room
from perf_model.search.planner import (
    EXHAUSTIVE_UP_TO,
    MAX_SLOTS,
    MOST_SUB_GROUPS,
    SUB_GROUP_SIZES,
    plan_sub_groups,
    plan_updates,
)
from perf_model.training_run.job import PARAM_BYTES

ROUNDING = 1e-9

PICTURE = Bars("update over the bound with fill and drain", "update over the bound of the work", "planning, CPU time")


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The plan of one machine; ``ratio`` is of its update to the bound with fill and drain."""

    machine: str
    sub_groups: int
    ratio: float
    ratio_to_work: float


def judge(machine: Machine) -> Judged:
    """With the sub-group size that exposes least."""
    cost, budgets = machine.cost, machine.budgets
    _, planned = plan_sub_groups(machine.workload, SUB_GROUP_SIZES, cost, budgets, Windows(), PARAM_BYTES)
    workload = planned.plan.workload
    bound = bound_with_fill_and_drain(workload, cost, Room.of(workload, budgets.gpu_bytes))
    return Judged(
        machine=str(machine),
        sub_groups=len(workload.sub_groups),
        ratio=planned.update_s / bound.seconds,
        ratio_to_work=planned.ratio_to_bound,
    )


def planning_s(machine: Machine) -> list[tuple[int, float]]:
    """How many sub-groups, and CPU seconds to plan them, by sub-group size."""
    times = []
    for size in SUB_GROUP_SIZES:
        workload = machine.workload(size)
        if len(workload.sub_groups) <= MOST_SUB_GROUPS:
            start_s = time.process_time()
            plan_updates(workload, machine.cost, machine.budgets)
            times.append((len(workload.sub_groups), time.process_time() - start_s))
    return times


def excess_over_every_plan(machine: Machine) -> float | None:
    """By how much the plan is worse than the best of all, as a ratio less 1, with the most sub-groups up to ten.

    None if the model has no so few.
    """
    few = [its for its in map(machine.workload, SUB_GROUP_SIZES) if len(its.sub_groups) <= EXHAUSTIVE_UP_TO]
    if not few:
        return None
    workload = max(few, key=lambda its: len(its.sub_groups))
    simulator = Simulator(machine.cost)
    least_s = min(simulator.run(plan.schedule, workload).end_s for plan in _every_plan(workload, machine))
    return plan_updates(workload, machine.cost, machine.budgets).exposed_s / least_s - 1


def _every_plan(workload: Workload, machine: Machine) -> Iterator[UpdatePlan]:
    for placements in product(Placement, repeat=len(workload.sub_groups)):
        order = rising_and_falling(workload, placements)
        for num_slots in range(1, max(1, min(MAX_SLOTS, placements.count(Placement.STREAMED))) + 1):
            plan = UpdatePlan(workload=workload, placements=placements, num_slots=num_slots)
            if not machine.budgets.missing(memory_of(plan)):
                yield plan
                yield replace(plan, order=order)


def measure(*, quick: bool) -> Iterator[Row]:
    yield from of_machines(*((8, 2, 1) if quick else (540, 40, 8)), seed=0)


def of_machines(count: int, timed: int, exhaustive: int, seed: int) -> Iterator[Row]:
    """``count`` of the grid's 4,320, drawn by ``seed``; planning is timed on ``timed`` of them, and on ``exhaustive``
    every plan is tried."""
    drawn = machines(count, seed)
    with ProcessPoolExecutor(os.cpu_count()) as processes:
        judged = list(processes.map(judge, drawn, chunksize=4))
        # One at a time: the others would slow it.
    about = {"machines": count, "seed": seed}
    plans = partial(Row, arm="plans", unit="times", setting=about)
    yield plans(quantity="update over the bound with fill and drain", samples=[its.ratio for its in judged])
    yield plans(quantity="update over the bound of the work", samples=[its.ratio_to_work for its in judged])
    worst = max(judged, key=lambda its: its.ratio)
    yield plans(quantity="farthest from the bound", samples=[worst.ratio])
    yield plans(quantity="which is", said=f"{worst.machine}; {worst.sub_groups} sub-groups")
    none_beats = all(its.ratio >= 1 - ROUNDING for its in judged)
    yield plans(quantity="none beats the bound", said=none_beats, claimed=True)
    excesses = _excesses(drawn, exhaustive)
    best = all(excess <= ROUNDING for excess in excesses)
    yield plans(quantity=f"none of {len(excesses)} is worse than another plan that fits", said=best, claimed=True)
    times: dict[str, list[float]] = {}
    for number, seconds in sorted(pair for machine in drawn[:timed] for pair in planning_s(machine)):
        name = next(f"up to {most} sub-groups" for most in (10, 100, 1000) if number <= most)
        times.setdefault(name, []).append(seconds)
    for name, samples in times.items():
        yield Row(arm=name, quantity="planning, CPU time", unit="s", samples=samples, setting=about)


def _excesses(drawn: Iterable[Machine], count: int) -> list[float]:
    found: list[float] = []
    for machine in drawn:
        if len(found) == count:
            break
        excess = excess_over_every_plan(machine)
        if excess is not None:
            found.append(excess)
    return found
