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
    """Return, by the name of a prefetch, the flush of the update before that the prefetch waits for.

    A prefetch waits for the last flush out of its memory and for the flush of its unit. A wait that another implies is
    left out.
    """
    flushes = [action for action in schedule.actions if action.kind is ActionKind.FLUSH_STATES]
    last_out_of = {flush.slot: number for number, flush in enumerate(flushes)}
    flush_of = {flush.unit: number for number, flush in enumerate(flushes)}
    shift, finished, filled = slot_shift(schedule), -1, set()
    before = {}
    for prefetch in schedule.actions:
        if prefetch.kind is not ActionKind.PREFETCH or prefetch.slot is None:
            continue
        needed = flush_of[prefetch.unit]
        if prefetch.slot not in filled:
            needed = max(needed, last_out_of.get((prefetch.slot + shift) % schedule.num_slots, -1))
            filled.add(prefetch.slot)
        if needed > finished:
            before[prefetch.name] = flushes[needed].name
            finished = needed
    return before
