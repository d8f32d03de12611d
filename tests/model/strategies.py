"""Hypothesis strategies for plans, and for schedules that no lowering pass would choose."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from perf_model.schedule.action import Action, ActionKind, Lane
from perf_model.schedule.happens_before import CHAINS, EAGER_CHAIN
from perf_model.schedule.lowering import insert_waits
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.workload import Workload


def numels(max_numel: int = 10**6) -> st.SearchStrategy[list[int]]:
    """Return a strategy for the lengths of up to 12 units."""
    return st.lists(st.integers(1, max_numel), min_size=1, max_size=12)


@st.composite
def workloads(draw: st.DrawFn, lengths: list[int]) -> Workload:
    """Draw a workload of units of these lengths: forward uses each parameter once, or some of them several times."""
    workload = Workload.from_numels(lengths)
    if draw(st.booleans()):
        return workload
    uses = [draw(st.integers(1, 50)), *(draw(st.integers(0, 50)) for _ in lengths[1:])]
    return Workload(
        tuple(replace(unit, used_numel=count * unit.numel) for unit, count in zip(workload.units, uses, strict=True))
    )


@st.composite
def plans(draw: st.DrawFn, max_numel: int = 10**6, *, may_be_eager: bool = False) -> UpdatePlan:
    """Draw a plan with any placements, any number of slots up to 6, any order, and any eager units if there may be."""
    workload = draw(workloads(draw(numels(max_numel))))
    count = len(workload.units)
    placements = draw(st.lists(st.sampled_from(Placement), min_size=count, max_size=count))
    order = draw(st.one_of(st.none(), st.permutations(range(count)).map(tuple)))
    plan = UpdatePlan(workload=workload, placements=tuple(placements), num_slots=draw(st.integers(1, 6)), order=order)
    if not may_be_eager or not plan.eligible_as_eager:
        return plan
    return replace(plan, eager=frozenset(draw(st.sets(st.sampled_from(sorted(plan.eligible_as_eager))))))


@st.composite
def schedules_with_more_waits(draw: st.DrawFn, max_numel: int = 10**6) -> tuple[Schedule, Workload]:
    """Draw a schedule with additional waits that are not needed, for earlier actions of any other stream."""
    schedule, workload = draw(schedules(max_numel))
    actions: list[Action] = []
    for action in schedule.actions:
        others = [other.name for other in actions if other.lane not in (action.lane, Lane.CPU, Lane.PUBLISH)]
        more = draw(st.lists(st.sampled_from(others), max_size=2, unique=True)) if others else []
        actions.append(replace(action, waits=tuple(dict.fromkeys([*action.waits, *more]))))
    return replace(schedule, actions=tuple(actions)), workload


@st.composite
def schedules(draw: st.DrawFn, max_numel: int = 10**6, *, may_be_eager: bool = False) -> tuple[Schedule, Workload]:
    """Draw any issue order and any use of the slots that the dependencies permit, with the waits that it needs.

    Units are published in the order in which the CPU updates them, because the executor publishes them so.
    """
    plan = draw(plans(max_numel, may_be_eager=may_be_eager))
    chains = {
        index: list(EAGER_CHAIN if index in plan.eager else CHAINS[placement])
        for index, placement in enumerate(plan.placements)
    }
    free = list(range(plan.num_slots))
    slots: dict[int, int] = {}
    unpublished: list[int] = []
    actions = []

    def is_possible(index: int, kind: ActionKind) -> bool:
        return {ActionKind.PREFETCH: bool(free), ActionKind.PUBLISH: unpublished[:1] == [index]}.get(kind, True)

    while any(chains.values()):
        possible = [index for index, left in chains.items() if left and is_possible(index, left[0])]
        index = draw(st.sampled_from(possible))
        kind = chains[index].pop(0)
        if kind in (ActionKind.CPU_STEP, ActionKind.COMMIT):
            unpublished.append(index)
        if kind is ActionKind.PUBLISH:
            unpublished.remove(index)
        if kind is ActionKind.PREFETCH:
            slots[index] = free.pop(draw(st.integers(0, len(free) - 1)))
        actions.append(Action(kind, index, slots.get(index)))
        if kind is ActionKind.FLUSH_STATES:
            free.append(slots[index])
    slot_numel = max((plan.workload.units[index].numel for index in slots), default=0)
    schedule = Schedule(
        num_slots=plan.num_slots,
        slot_numel=slot_numel,
        actions=tuple(insert_waits(actions)),
    )
    return schedule, plan.workload
