"""Decide from a schedule alone, by happens-before, whether it is safe to execute."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace

from perf_model.schedule.action import Action, ActionKind
from perf_model.schedule.happens_before import CHAINS, DISK_CHAIN, EAGER_CHAINS, EMPTIED_BY, Clocks, dependencies
from perf_model.schedule.placement import Placement
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.slots import flushes_before, slot_shift
from perf_model.schedule.workload import Workload


class ScheduleError(ValueError):
    """A schedule that must not be executed. The message ends with its actions, of which the failing one is marked."""

    def __init__(self, schedule: Schedule, failing: Action | None, rule: str) -> None:
        rows = (f"{'>' if action is failing else ' '} {action}" for action in schedule.actions)
        super().__init__("\n".join([rule, *rows]))


def check(schedule: Schedule, workload: Workload) -> tuple[Placement, ...]:
    """Return the placements that ``schedule`` executes. Raise ``ScheduleError`` at its first fault.

    - Every unit has exactly the actions of one placement, each once and in order.
    - Waits name actions of other lanes that were issued before, so that nothing deadlocks.
    - Every action starts after the data that it reads was written.
    - An eager unit commits the version of its states that was speculated, and publishes the committed one.
    - A slot exists, is large enough, and is reused only after the states of its previous occupant were flushed.
    - The first prefetches of an update also wait for the flushes of the update before, which may be in flight.
    """
    placements = _check_chains(schedule, workload)
    _check_slots(schedule, workload, placements)
    _check_order(schedule)
    check_next_update(schedule, flushes_before(schedule))
    return placements


def check_next_update(schedule: Schedule, carried: Mapping[str, str]) -> None:
    """Raise ``ScheduleError`` if the next update may overwrite or read what this one still flushes or writes.

    ``carried`` maps a prefetch or a read to the flush or write of the update before that it waits for. The next update
    has the same schedule, with the slots of streamed units shifted by ``slot_shift``.
    """
    by_name = {action.name: action for action in schedule.actions}
    clocks = Clocks()
    for action in schedule.actions:
        clocks.issue(action, clocks.start_clock(action, action.waits))
    emptying = [action for action in schedule.actions if action.kind in EMPTIED_BY.values()]
    of_unit, last_out_of = {each.unit: each for each in emptying}, {(each.kind, each.slot): each for each in emptying}
    filled: set[tuple[ActionKind, int]] = set()
    later = 1 + max((action.unit for action in schedule.actions), default=0)
    for action in schedule.actions:
        waits = [replace(by_name[name], unit=by_name[name].unit + later).name for name in action.waits]
        waits += [carried[action.name]] if action.name in carried else []
        following = replace(action, unit=action.unit + later)
        start = clocks.start_clock(following, waits)
        if action.kind in EMPTIED_BY and action.slot is not None:
            in_use, memory = [of_unit[action.unit]], action.slot
            if action.kind is ActionKind.PREFETCH:
                memory = (memory + slot_shift(schedule)) % schedule.num_slots
            if (action.kind, action.slot) not in filled:
                last = EMPTIED_BY[action.kind], memory
                in_use += [last_out_of[last]] if last in last_out_of else []
                filled.add((action.kind, action.slot))
            for before in in_use:
                if not clocks.has_finished(before, start):
                    rule = f"{action.name} of the next update may start before {before.name} has finished."
                    raise ScheduleError(schedule, action, rule)
        clocks.issue(following, start)


def _check_chains(schedule: Schedule, workload: Workload) -> tuple[Placement, ...]:
    seen = Counter(action.name for action in schedule.actions)
    kinds: dict[int, list[ActionKind]] = defaultdict(list)
    for action in schedule.actions:
        if seen[action.name] > 1:
            raise ScheduleError(schedule, action, "An action is issued once per step.")
        if not 0 <= action.unit < len(workload.units):
            raise ScheduleError(schedule, action, f"There are {len(workload.units)} units.")
        kinds[action.unit].append(action.kind)
    by_chain = {chain: placement for chains in (CHAINS, EAGER_CHAINS) for placement, chain in chains.items()}
    of_disk: dict[tuple[ActionKind, ...], Placement] = {DISK_CHAIN: Placement.CPU}
    placements = []
    for unit in workload.units:
        chains_of_unit = of_disk if unit.is_on_disk else by_chain
        placement = chains_of_unit.get(tuple(kinds[unit.index]))
        if placement is None:
            last = [action for action in schedule.actions if action.unit == unit.index][-1:]
            chains = " or ".join(" ".join(kind.value for kind in chain) for chain in chains_of_unit)
            found = " ".join(kind.value for kind in kinds[unit.index]) or "nothing"
            rule = f"Unit {unit.index} is updated by {chains}, in that order; found {found}."
            raise ScheduleError(schedule, last[0] if last else None, rule)
        placements.append(placement)
    return tuple(placements)


def _check_slots(schedule: Schedule, workload: Workload, placements: tuple[Placement, ...]) -> None:
    slot_of: dict[int, int | None] = {}
    for action in schedule.actions:
        on_disk = workload.units[action.unit].is_on_disk
        if not (on_disk or placements[action.unit] is Placement.STREAMED):
            if action.slot is not None:
                raise ScheduleError(schedule, action, "Only a streamed unit and one on disk use a slot.")
            continue
        num_slots = schedule.num_disk_slots if on_disk else schedule.num_slots
        if action.slot is None or not 0 <= action.slot < num_slots:
            raise ScheduleError(schedule, action, f"{action.kind.value} needs one of {num_slots} slots.")
        if slot_of.setdefault(action.unit, action.slot) != action.slot:
            raise ScheduleError(schedule, action, "A unit stays in the slot that it was prefetched to.")
        length = workload.units[action.unit].length
        if not on_disk and length > schedule.slot_numel:
            rule = f"A slot holds {schedule.slot_numel} parameters; unit {action.unit} has {length}."
            raise ScheduleError(schedule, action, rule)


def _check_order(schedule: Schedule) -> None:
    needs = dependencies(schedule.actions)
    by_name = {action.name: action for action in schedule.actions}
    clocks = Clocks()
    for action in schedule.actions:
        for name in action.waits:
            if not clocks.is_issued(name):
                raise ScheduleError(schedule, action, f"A wait names an action that was issued before; {name} was not.")
            if by_name[name].lane is action.lane:
                raise ScheduleError(schedule, action, f"A wait names an action of another lane; {name} is on the same.")
        start = clocks.start_clock(action, action.waits)
        for producer in needs[action.name]:
            if not clocks.has_finished(producer, start):
                raise ScheduleError(schedule, action, f"{action.name} may start before {producer.name} has finished.")
        clocks.issue(action, start)
