"""How good and how fast plans are, on machines that nobody measured: ``python -m benchmarks.planner``.

A plan's update is compared with the least that any plan can take: the work bound with the unavoidable fill and drain
(``perf_model/fill_and_drain.py``). With up to ten sub-groups it is compared with every plan that fits. Ends with 1 if a
plan beats its bound, or is worse than another that fits.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from statistics import median, quantiles

from benchmarks.record import record
from benchmarks.synthetic import Machine, machines
from perf_model.bounds import Room
from perf_model.fill_and_drain import bound_with_fill_and_drain
from perf_model.memory import memory_of
from perf_model.order import rising_and_falling
from perf_model.placement import Placement
from perf_model.plan import UpdatePlan
from perf_model.planner import EXHAUSTIVE_UP_TO, MAX_SLOTS, plan_updates
from perf_model.simulate import Simulator
from perf_model.sub_group_size import MOST_SUB_GROUPS, SUB_GROUP_SIZES, plan_sub_groups
from perf_model.windows import Windows
from perf_model.workload import Workload

PARAM_BYTES = 2

ROUNDING = 1e-9


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


def spread(values: Sequence[float]) -> dict[str, float]:
    p90 = quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]
    return {"median": median(values), "p90": p90, "max": max(values)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__.splitlines()[0])
    parser.add_argument("--machines", type=int, default=540, help="how many of the grid's 4,320 (default: 540)")
    parser.add_argument("--timed", type=int, default=40, help="on how many of these planning is timed (default: 40)")
    parser.add_argument("--exhaustive", type=int, default=8, help="on how many every plan is tried (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn from the grid (default: 0)")
    options = parser.parse_args(arguments)
    drawn = machines(options.machines, options.seed)
    with ProcessPoolExecutor(os.cpu_count()) as processes:
        judged = list(processes.map(judge, drawn, chunksize=4))
        # One at a time: the others would slow it.
    times = [pair for machine in drawn[: options.timed] for pair in planning_s(machine)]
    excesses = _excesses(drawn, options.exhaustive)
    beaten = [its for its in judged if its.ratio < 1 - ROUNDING]
    worse = [excess for excess in excesses if excess > ROUNDING]
    row = {
        "machines": len(judged),
        "seed": options.seed,
        "ratio_to_bound_with_fill_and_drain": spread([its.ratio for its in judged]),
        "ratio_to_work_bound": spread([its.ratio_to_work for its in judged]),
        "beat_the_bound": len(beaten),
        "planning_cpu_s": _by_count(times),
        "tried_every_plan": len(excesses),
        "worse_than_another": len(worse),
    }
    _print(judged, row)
    print(record("planner", ("numpy",), row))
    return 1 if beaten or worse else 0


def _excesses(drawn: Iterable[Machine], count: int) -> list[float]:
    found: list[float] = []
    for machine in drawn:
        if len(found) == count:
            break
        excess = excess_over_every_plan(machine)
        if excess is not None:
            found.append(excess)
    return found


def _by_count(times: Iterable[tuple[int, float]]) -> dict[str, dict[str, float]]:
    """Seconds by how many sub-groups were planned."""
    groups: dict[str, list[float]] = {}
    for count, seconds in sorted(times):
        name = next(f"up to {most}" for most in (10, 100, 1000) if count <= most)
        groups.setdefault(name, []).append(seconds)
    return {name: spread(seconds) for name, seconds in groups.items()}


def _print(judged: Sequence[Judged], row: dict[str, object]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("ratio to the bound", "sub-groups", "machine", title="The ten plans that are farthest from it")
    for its in sorted(judged, key=lambda its: -its.ratio)[:10]:
        table.add_row(f"{its.ratio:.3f}", str(its.sub_groups), its.machine)
    console = Console()
    console.print(table)
    console.print_json(data=row)


if __name__ == "__main__":
    raise SystemExit(main())
