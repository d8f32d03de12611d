"""Relate the slots of an update to those of the update before.

Prefetches go to slot 0 first, while the last flushes of the update before may still empty the slots. The runtime shifts
the slots by ``slot_shift`` after each update, so that slot 0 is emptied first and no prefetch waits behind one whose
slot is flushed later. With 5 units and 3 slots of memory::

    unit                  0  1  2  3  4
    slot, first update    0  1  2  0  1     the last flushes empty 2, 0, 1
    slot, second update   2  0  1  2  0     and 1, 2, 0
    slot, third update    1  2  0  1  2
"""

from __future__ import annotations

from math import gcd

from perf_model.schedule.action import ActionKind
from perf_model.schedule.happens_before import EMPTIED_BY
from perf_model.schedule.schedule import Schedule

MOST_PAIRS = 25_000
"""The most pairs of a unit and a slot with which slots are shifted. The runtime keeps views for each pair."""


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
