"""Make engines run another plan after their steps, and count the units that move."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any
from unittest import mock

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from deep_opt_states.zero.internals.compat import partitions_by_name
from deep_opt_states.zero.stage3 import DeepOptimizerStates_Stage3
from deep_opt_states.zero.step.running_plan import RunningPlan
from perf_model.schedule.cutting import cut_into_units
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, place_all
from perf_model.schedule.workload import Partition, Range

KINDS = {f"{one.value} to {other.value}" for one in Placement for other in Placement if one is not other}


@dataclass
class MoveCounts:
    """The moves on one rank: ``kinds`` by old and new placement, plans with other cuts, evictions and restorations."""

    kinds: Counter[str] = field(default_factory=Counter)
    recut_plans: int = 0
    evictions: int = 0
    restorations: int = 0

    def add(self, before: UpdatePlan, plan: UpdatePlan) -> None:
        placed = _placements(before)
        for (first, *_), placement in _placements(plan).items():
            (old,) = (
                old
                for runs, old in placed.items()
                if any(run.sub_group == first.sub_group and run.begin <= first.begin < run.end for run in runs)
            )
            if old is not placement:
                self.kinds[f"{old.value} to {placement.value}"] += 1
        self.recut_plans += bool(_placements(plan).keys() - placed.keys())


def _placements(plan: UpdatePlan) -> dict[tuple[Range, ...], Placement]:
    placed = zip(plan.workload.units, plan.placements, strict=True)
    return {unit.ranges: placement for unit, placement in placed if not unit.is_persistent}


NUM_UNITS = (80, 27, 12, 1)
"""The numbers of units of random plans, about: no unit crosses a border of parameters that share no sub-group."""

EVICTED, EVICTED_IN_FORWARD = 0.2, 0.1
"""The share of the steps after which the memory of the plan is evicted, on all ranks, and of the forwards before
which it is evicted as before a larger input, on one rank alone."""


def random_moves(seed: int, moved: MoveCounts, change_after: float) -> AbstractContextManager[None]:
    """Return a context in which engines run random plans after some steps, and sometimes lose the memory of one."""
    rng, evictions = random.Random(seed), random.Random(f"evictions {seed}")
    evictions_in_forward = random.Random(f"evictions in forward {seed} {dist.get_rank()}")

    def evict(running: RunningPlan) -> None:
        was_evicted = running.is_evicted
        running.evict()
        moved.evictions += running.is_evicted and not was_evicted

    def adapt(running: RunningPlan) -> bool:
        if evictions.random() < EVICTED:
            evict(running)
        elif running.is_evicted:
            assert running.restore()
            moved.restorations += 1
        if rng.random() >= change_after:
            return False
        _adopt(running, random_plan(rng, _sub_groups(running)), moved)
        return True

    def before_forward(optimizer: Any) -> None:
        if evictions_in_forward.random() < EVICTED_IN_FORWARD:
            optimizer._before_eviction()
            evict(optimizer._running)

    return _adapting(adapt, before_forward)


def moves_in_turn(*placed: tuple[Placement, int]) -> Callable[[], AbstractContextManager[None]]:
    """Return what makes a context in which engines run plans with these placements and sizes of units, in turn."""

    def seeded() -> AbstractContextManager[None]:
        turns = cycle(placed)

        def adapt(running: RunningPlan) -> bool:
            placement, unit_size = next(turns)
            workload = cut_into_units(_sub_groups(running), unit_size)
            plan = UpdatePlan(workload=workload, placements=place_all(workload, placement), num_slots=1)
            _adopt(running, plan, MoveCounts())
            return True

        return _adapting(adapt)

    return seeded


def random_plan(rng: random.Random, sub_groups: list[list[Partition]]) -> UpdatePlan:
    numel = sum(partition.numel for sub_group in sub_groups for partition in sub_group)
    workload = cut_into_units(sub_groups, -(-numel // rng.choice(NUM_UNITS)))
    allowed = rng.choice((tuple(Placement), tuple(Placement), (Placement.CPU, Placement.RESIDENT), (Placement.CPU,)))
    order = list(range(len(workload.units)))
    rng.shuffle(order)
    return UpdatePlan(
        workload=workload,
        placements=tuple(Placement.CPU if unit.is_persistent else rng.choice(allowed) for unit in workload.units),
        num_slots=rng.randint(1, 3),
        order=rng.choice((None, tuple(order))),
    )


@contextmanager
def _adapting(
    adapt: Callable[[RunningPlan], bool], before_forward: Callable[[Any], object] = lambda optimizer: None
) -> Iterator[None]:
    """Call ``adapt``, which returns whether the plan has changed, and ``before_forward`` where the engine adapts."""
    forward = DeepSpeedEngine.forward

    def adapted(optimizer: DeepOptimizerStates_Stage3) -> None:
        if adapt(optimizer._running):
            optimizer._progress.plan_changed(optimizer.report, optimizer._assembly)

    def act_and_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.optimizer, DeepOptimizerStates_Stage3):
            before_forward(self.optimizer)
        return forward(self, *args, **kwargs)

    with (
        mock.patch.object(DeepOptimizerStates_Stage3, "_adapt", adapted),
        mock.patch.object(DeepSpeedEngine, "forward", act_and_forward),
    ):
        yield


def _adopt(running: RunningPlan, plan: UpdatePlan, moved: MoveCounts) -> None:
    moved.add(running.plan, plan)
    was_evicted = running.is_evicted
    running.adopt(plan)
    assert was_evicted or running.restore()
    assert running.plan == plan


def _sub_groups(running: RunningPlan) -> list[list[Partition]]:
    return partitions_by_name(running.gradients._optimizer)
