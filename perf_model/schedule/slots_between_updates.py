"""Relate the slots of an update to those of the update before.

Prefetches for an update are issued to slot 0 first, while the last flushes of the update before may still empty the
slots. If the number of streamed units is not a multiple of the number of slots, they end with another slot than the
last one, and a prefetch would wait behind one whose slot is flushed later. The runtime therefore shifts the slots by
``slot_shift`` after each update, so that slot 0 is the one that is emptied first. With 5 units and 3 slots of memory::

    unit                  0  1  2  3  4
    slot, first update    0  1  2  0  1     the last flushes empty 2, 0, 1
    slot, second update   2  0  1  2  0     and 1, 2, 0
    slot, third update    1  2  0  1  2
"""

from __future__ import annotations

from perf_model.schedule.action import ActionKind
from perf_model.schedule.schedule import Schedule


def slot_shift(schedule: Schedule) -> int:
    """Return the slot that the last flushes empty first. It is slot 0 of the next update."""
    streamed = sum(action.kind is ActionKind.FLUSH_STATES for action in schedule.actions)
    return streamed % schedule.num_slots if schedule.num_slots else 0


def flushes_before(schedule: Schedule) -> dict[str, str]:
    """Return the flush of the update before that each prefetch waits for which waits for no action of its own update.

    Both have the same schedule. It is the last flush out of the memory of its slot, or that of its unit, whose states
    it reads, if that is later. Flushes run in order, so the prefetch need not wait for both.
    """
    flushes = [action for action in schedule.actions if action.kind is ActionKind.FLUSH_STATES]
    shift = slot_shift(schedule)
    before = {}
    for prefetch in schedule.actions:
        if prefetch.kind is ActionKind.PREFETCH and prefetch.slot is not None and not prefetch.waits:
            slot = (prefetch.slot + shift) % schedule.num_slots
            *_, last = (flush for flush in flushes if flush.slot == slot or flush.unit == prefetch.unit)
            before[prefetch.name] = last.name
    return before
