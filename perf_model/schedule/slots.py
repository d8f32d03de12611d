"""Order the units that the accelerator updates, and assign the slots through which the streamed ones pass.

Eager units pass first, as backward completes them: those first that forward uses last. If the step was not updated in
backward, they pass last instead, in forward's order, as without eager units::

    unit, in forward's order     0  1  2  3  4     2, 3 and 4 are eager
    order                        4  3  2  0  1
    order of a step in vain      0  1  2  3  4
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from perf_model.schedule.action import Action, ActionKind, Lane
from perf_model.schedule.happens_before import insert_waits
from perf_model.schedule.placement import Placement
from perf_model.schedule.schedule import Schedule


def in_order_of_slots(order: Sequence[int], placements: Sequence[Placement], eager: Collection[int]) -> list[int]:
    """Return the streamed units in the order in which they use slots: the eager ones as backward completes them."""
    streamed = [index for index in order if placements[index] is Placement.STREAMED]
    return [index for index in reversed(streamed) if index in eager] + [
        index for index in streamed if index not in eager
    ]


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
