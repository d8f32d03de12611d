"""Make engines run another plan after their steps, and count the units that move."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import cycle
from unittest import mock

from deep_opt_states.zero.internals.compat import partitions_by_name
from deep_opt_states.zero.step.adaptation import OrderAdaptation, Replanning
from deep_opt_states.zero.step.running_plan import RunningPlan
from perf_model.schedule.cutting import cut_into_units
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.simple_placements import place_all
from perf_model.schedule.workload import Partition

UNIT_SIZES = (100, 300, 700, 10**9)

EVICTED = 0.2
"""The share of the steps after which the states of residents are evicted, as before a larger input."""

KINDS = {f"{one.value} to {other.value}" for one in Placement for other in Placement if one is not other}
"""The kinds of moves: from each placement to each other one."""


def random_moves(seed: int, moved: Counter[str], change_after: float = 0.7) -> AbstractContextManager[None]:
    """Return a context in which engines run a random plan after a share ``change_after`` of their steps.

    Sometimes the memory of the plan is given back before that, until the next step. The plan is the same on every rank.
    ``moved`` counts, by the old and the new placement, the units of the new plan whose first element was in a unit with
    another placement.
    """
    rng, evictions = random.Random(seed), random.Random(f"evictions {seed}")

    def adapt(running: RunningPlan) -> bool:
        if evictions.random() < EVICTED:
            running.evict()
        elif running.is_evicted:
            assert running.restore()
        if rng.random() >= change_after:
            return False
        _adopt(running, random_plan(rng, _sub_groups(running)), moved)
        return True

    return _adapting(adapt)


def moves_in_turn(*placed: tuple[Placement, int]) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that returns a context in which engines run another plan after each step, in turn.

    ``placed`` has the placement and the size of all units of each plan.
    """

    def seeded() -> AbstractContextManager[None]:
        turns = cycle(placed)

        def adapt(running: RunningPlan) -> bool:
            placement, unit_size = next(turns)
            workload = cut_into_units(_sub_groups(running), unit_size)
            plan = UpdatePlan(workload=workload, placements=place_all(workload, placement), num_slots=1)
            _adopt(running, plan, Counter())
            return True

        return _adapting(adapt)

    return seeded


def random_plan(rng: random.Random, sub_groups: list[list[Partition]]) -> UpdatePlan:
    """Return a plan with random units, placements, slots and order."""
    workload = cut_into_units(sub_groups, rng.choice(UNIT_SIZES))
    allowed = rng.choice((tuple(Placement), tuple(Placement), (Placement.CPU, Placement.RESIDENT), (Placement.CPU,)))
    order = list(range(len(workload.units)))
    rng.shuffle(order)
    return UpdatePlan(
        workload=workload,
        placements=tuple(rng.choice(allowed) for _ in workload.units),
        num_slots=rng.randint(1, 3),
        order=rng.choice((None, tuple(order))),
    )


@contextmanager
def _adapting(adapt: Callable[[RunningPlan], bool]) -> Iterator[None]:
    """Call ``adapt`` where the engine would adapt its own plan. It returns whether the plan has changed."""

    def adapted(adaptation: OrderAdaptation | Replanning, *, memory_is_short: bool) -> bool:
        return adapt(adaptation._running)

    with mock.patch.object(OrderAdaptation, "adapt", adapted), mock.patch.object(Replanning, "adapt", adapted):
        yield


def _adopt(running: RunningPlan, plan: UpdatePlan, moved: Counter[str]) -> None:
    before = _placements(running.plan)
    assert running.adopt(plan)
    assert running.plan == plan
    for (sub_group, begin), (_, placement) in _placements(plan).items():
        old = next(old for (other, first), (end, old) in before.items() if other == sub_group and first <= begin < end)
        if old is not placement:
            moved[f"{old.value} to {placement.value}"] += 1


def _sub_groups(running: RunningPlan) -> list[list[Partition]]:
    return partitions_by_name(running.gradients._optimizer)


def _placements(plan: UpdatePlan) -> dict[tuple[int, int], tuple[int, Placement]]:
    placed = zip(plan.workload.units, plan.placements, strict=True)
    return {(unit.sub_group, unit.begin): (unit.end, placement) for unit, placement in placed}
