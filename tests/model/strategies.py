"""Draw plans, and schedules that no lowering pass would choose; read schedules from text; and remove their waits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from hypothesis import strategies as st

from perf_model.schedule.action import Action, ActionKind, Lane
from perf_model.schedule.happens_before import CHAINS, DISK_CHAIN, EAGER_CHAINS, EMPTIED_BY, insert_waits
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.workload import Workload


@st.composite
def workloads(draw: st.DrawFn, max_numel: int) -> Workload:
    """Draw a workload of up to 12 units: forward uses each parameter once, or some of them several times."""
    lengths = draw(st.lists(st.integers(1, max_numel), min_size=1, max_size=12))
    workload = Workload.from_numels(lengths)
    if draw(st.booleans()):
        return workload
    uses = [draw(st.integers(1, 50)), *(draw(st.integers(0, 50)) for _ in lengths[1:])]
    return Workload(
        tuple(replace(unit, used_numel=count * unit.numel) for unit, count in zip(workload.units, uses, strict=True))
    )


@st.composite
def plans(
    draw: st.DrawFn, max_numel: int = 10**6, *, may_be_eager: bool = False, may_be_on_disk: bool = False
) -> UpdatePlan:
    workload = draw(workloads(max_numel))
    count = len(workload.units)
    placements = draw(st.lists(st.sampled_from(Placement), min_size=count, max_size=count))
    order = draw(st.one_of(st.none(), st.permutations(range(count)).map(tuple)))
    plan = UpdatePlan(workload=workload, placements=tuple(placements), num_slots=draw(st.integers(1, 6)), order=order)
    if may_be_eager and plan.eligible_as_eager:
        plan = replace(plan, eager=frozenset(draw(st.sets(st.sampled_from(sorted(plan.eligible_as_eager))))))
    others = {unit for unit in plan.eligible_as_eager - plan.eager if placements[unit] is Placement.CPU}
    if may_be_on_disk and others:
        on_disk = draw(st.sets(st.sampled_from(sorted(others))))
        units = (replace(unit, is_on_disk=unit.index in on_disk) for unit in workload.units)
        plan = replace(plan, workload=Workload(tuple(units)))
    return plan


@st.composite
def schedules(
    draw: st.DrawFn, max_numel: int = 10**6, *, may_be_eager: bool = False, may_be_on_disk: bool = False
) -> tuple[Schedule, Workload]:
    """Draw any issue order and any use of the slots that the dependencies permit, with the waits that it needs."""
    plan = draw(plans(max_numel, may_be_eager=may_be_eager, may_be_on_disk=may_be_on_disk))
    units = plan.workload.units
    chains = {
        index: list(
            DISK_CHAIN
            if units[index].is_on_disk
            else EAGER_CHAINS[placement]
            if index in plan.eager
            else CHAINS[placement]
        )
        for index, placement in enumerate(plan.placements)
    }
    num_disk_slots = draw(st.integers(1, 4)) if plan.workload.on_disk_numel else 0
    free = {ActionKind.PREFETCH: list(range(plan.num_slots)), ActionKind.READ: list(range(num_disk_slots))}
    slots: dict[int, int] = {}
    unpublished: list[int] = []
    actions = []

    def is_possible(index: int, kind: ActionKind) -> bool:
        return bool(free[kind]) if kind in free else kind is not ActionKind.PUBLISH or unpublished[:1] == [index]

    while any(chains.values()):
        possible = [index for index, left in chains.items() if left and is_possible(index, left[0])]
        index = draw(st.sampled_from(possible))
        kind = chains[index].pop(0)
        if kind in (ActionKind.CPU_STEP, ActionKind.COMMIT):
            unpublished.append(index)
        if kind is ActionKind.PUBLISH:
            unpublished.remove(index)
        if kind in free:
            slots[index] = free[kind].pop(draw(st.integers(0, len(free[kind]) - 1)))
        actions.append(Action(kind, index, slots.get(index)))
        for fills, empties in EMPTIED_BY.items():
            if kind is empties:
                free[fills].append(slots[index])
    slot_numel = max((units[index].numel for index in slots if not units[index].is_on_disk), default=0)
    schedule = Schedule(
        num_slots=plan.num_slots,
        slot_numel=slot_numel,
        actions=tuple(insert_waits(actions)),
        num_disk_slots=num_disk_slots,
    )
    return schedule, plan.workload


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


_ACTION = re.compile(r"(?P<kind>[A-Z_]+) (?P<unit>\d+)( slot (?P<slot>\d+))?( after (?P<waits>.+))?")


def parse_schedule(text: str, num_slots: int, slot_numel: int) -> Schedule:
    """Return the schedule of the actions in ``text``, one per line: ``PREFETCH 3 slot 0 after FLUSH_STATES 1``."""
    actions = []
    for line in text.strip().splitlines():
        match = _ACTION.fullmatch(line.strip())
        assert match is not None, line
        slot = None if match["slot"] is None else int(match["slot"])
        waits = () if match["waits"] is None else tuple(match["waits"].split(", "))
        actions.append(Action(kind=ActionKind[match["kind"]], unit=int(match["unit"]), slot=slot, waits=waits))
    return Schedule(num_slots=num_slots, slot_numel=slot_numel, actions=tuple(actions))


def without_one_wait(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    for position, action in enumerate(schedule.actions):
        for name in action.waits:
            mutant = replace(action, waits=tuple(wait for wait in action.waits if wait != name))
            actions = (*schedule.actions[:position], mutant, *schedule.actions[position + 1 :])
            yield f"{action.name} no longer waits for {name}", replace(schedule, actions=actions)
