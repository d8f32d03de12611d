"""Order the units that the accelerator updates, and assign the slots through which the streamed ones pass.

Eager units pass first, as backward completes them: those first that forward uses last. If the step was not updated in
backward, they pass last instead, in forward's order, as without eager units::

    unit, in forward's order     0  1  2  3  4     2, 3 and 4 are eager
    order                        4  3  2  0  1
    order of a step in vain      0  1  2  3  4

Prefetches go to slot 0 first, while the last flushes of the update before may still empty the slots. The runtime shifts
the slots by ``slot_shift`` after each update, so that slot 0 is emptied first and no prefetch waits behind one whose
slot is flushed later. With 5 units and 3 slots of memory::

    unit                  0  1  2  3  4
    slot, first update    0  1  2  0  1     the last flushes empty 2, 0, 1
    slot, second update   2  0  1  2  0     and 1, 2, 0
    slot, third update    1  2  0  1  2
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import gcd

from perf_model.schedule.action import Action, ActionKind, Lane
from perf_model.schedule.happens_before import EMPTIED_BY, insert_waits
from perf_model.schedule.placement import Placement
from perf_model.schedule.schedule import Schedule

MOST_PAIRS = 25_000
"""The most pairs of a unit and a slot with which slots are shifted. The runtime keeps views for each pair."""


def in_order_of_slots(order: Sequence[int], placements: Sequence[Placement], eager: Collection[int]) -> list[int]:
    """Return the streamed units in the order in which they use slots: the eager ones as backward completes them."""
    streamed = [index for index in order if placements[index] is Placement.STREAMED]
    early = [index for index in reversed(streamed) if index in eager]
    return early + [index for index in streamed if index not in eager]


def assign_slots(streamed: Sequence[int], num_slots: int) -> dict[int, int]:
    """Return the slot of each streamed unit, round robin."""
    return {index: position % num_slots for position, index in enumerate(streamed)}


def through_slots(
    order: Sequence[int], slots: Mapping[int, int], eager: Collection[int], *, adopts: bool
) -> list[Action]:
    """Return the actions that update the units ``order``, with each ADOPT as soon as possible if ``adopts``."""
    streamed = [index for index in order if index in slots]
    num_slots = max(slots.values(), default=-1) + 1
    actions = [Action(ActionKind.PREFETCH, index, slots[index]) for index in streamed[:num_slots]]
    waiting = iter(streamed[num_slots:])
    for index in order:
        step = ActionKind.GPU_SPECULATE if index in eager else ActionKind.GPU_STEP
        actions.append(Action(step, index, slots.get(index)))
        if index in slots:
            actions.append(Action(ActionKind.FLUSH_STATES, index, slots[index]))
            actions += [Action(ActionKind.PREFETCH, following, slots[following]) for following in islice(waiting, 1)]
            if adopts and index in eager:
                # Behind a prefetch that waits for the same flush.
                actions.append(Action(ActionKind.ADOPT, index, slots[index]))
    return actions


def in_vain(schedule: Schedule) -> Schedule:
    """Return ``schedule`` for a step before which backward has updated no streamed unit."""
    if not schedule.adopts:
        return schedule
    on_accelerator = (Lane.H2D, Lane.COMPUTE, Lane.D2H)
    actions = [replace(action, waits=()) for action in schedule.actions if action.lane not in on_accelerator]
    steps = [action for action in schedule.actions if action.kind in (ActionKind.GPU_STEP, ActionKind.ADOPT)]
    order = [action.unit for action in steps]
    slots = assign_slots([action.unit for action in steps if action.slot is not None], schedule.num_slots)
    actions += through_slots(order, slots, schedule.adopts, adopts=True)
    return replace(schedule, actions=tuple(insert_waits(actions)))


def slot_shift(schedule: Schedule) -> int:
    """Return the slot that is empty first and becomes slot 0, or 0 if there are more than ``MOST_PAIRS``."""
    if schedule.num_slots == 0:
        return 0
    streamed = sum(action.kind is ActionKind.FLUSH_STATES for action in schedule.actions)
    slots_of_a_unit = schedule.num_slots // gcd(streamed, schedule.num_slots)
    return streamed % schedule.num_slots if streamed * slots_of_a_unit <= MOST_PAIRS else 0


def flushes_before(schedule: Schedule) -> dict[str, str]:
    """Return, by the name of a prefetch or a read, the flush or write of the update before that it waits for.

    It waits for the last one out of its memory and for the one of its unit. A wait that another implies is left out.
    """
    return _before(schedule, ActionKind.PREFETCH, schedule.num_slots, slot_shift(schedule)) | _before(
        schedule, ActionKind.READ, schedule.num_disk_slots
    )


def _before(schedule: Schedule, fills: ActionKind, num_slots: int, shift: int = 0) -> dict[str, str]:
    emptying = [action for action in schedule.actions if action.kind is EMPTIED_BY[fills]]
    last_out_of = {action.slot: number for number, action in enumerate(emptying)}
    of_unit = {action.unit: number for number, action in enumerate(emptying)}
    finished, filled = -1, set()
    before = {}
    for filling in schedule.actions:
        if filling.kind is not fills or filling.slot is None:
            continue
        needed = of_unit[filling.unit]
        if filling.slot not in filled:
            needed = max(needed, last_out_of.get((filling.slot + shift) % num_slots, -1))
            filled.add(filling.slot)
        if needed > finished:
            before[filling.name] = emptying[needed].name
            finished = needed
    return before
