"""Lowering passes: placement and order -> slots -> issue order -> waits. Pure functions, one after another."""

from __future__ import annotations

from collections.abc import Sequence

from perf_model.schedule.action import Action, ActionKind
from perf_model.schedule.happens_before import CHAINS, Clocks, dependencies
from perf_model.schedule.placement import Placement
from perf_model.schedule.schedule import Schedule, bytes_of_slots
from perf_model.schedule.workload import Workload


def lower(workload: Workload, placements: Sequence[Placement], num_slots: int, order: Sequence[int]) -> Schedule:
    """The schedule that executes ``placements``; the host turns to the sub-groups in ``order``."""
    num_slots, slot_numel = needed_slots(workload, placements, num_slots)
    slots = assign_slots([index for index in order if placements[index] is Placement.STREAMED], num_slots)
    return Schedule(
        num_slots=num_slots,
        slot_numel=slot_numel,
        staging_bytes=bytes_of_slots(num_slots, slot_numel),
        actions=tuple(insert_waits(issue_order(order, placements, slots))),
    )


def needed_slots(workload: Workload, placements: Sequence[Placement], num_slots: int) -> tuple[int, int]:
    """How many, never more than streamed sub-groups, and the length in parameters of each."""
    placed = zip(workload.sub_groups, placements, strict=True)
    streamed = [sub_group.numel for sub_group, placement in placed if placement is Placement.STREAMED]
    return min(num_slots, len(streamed)), max(streamed, default=0)


def assign_slots(streamed: Sequence[int], num_slots: int) -> dict[int, int]:
    """Slot of each streamed sub-group, round robin in update order."""
    return {index: position % num_slots for position, index in enumerate(streamed)}


def issue_order(order: Sequence[int], placements: Sequence[Placement], slots: dict[int, int]) -> list[Action]:
    """Actions, without waits, in the order the host issues them.

    CPU updates wait for nobody and go first, so that the CPU lane is never idle. A prefetch is issued as soon as the
    flush that frees its slot has been, so that the h2d lane runs ahead by the number of slots.
    """
    on_cpu = [index for index in order if placements[index] is Placement.CPU]
    streamed = [index for index in order if placements[index] is Placement.STREAMED]
    num_slots = max(slots.values(), default=-1) + 1
    actions = [Action(ActionKind.CPU_STEP, index) for index in on_cpu]
    actions.extend(Action(ActionKind.PREFETCH, index, slots[index]) for index in streamed[:num_slots])
    waiting = streamed[num_slots:]
    for index in order:
        if placements[index] is Placement.CPU:
            actions.append(Action(ActionKind.PUBLISH, index))
            continue
        if placements[index] is Placement.RESIDENT:
            actions.append(Action(ActionKind.GPU_STEP, index))
            continue
        actions.append(Action(ActionKind.GPU_STEP, index, slots[index]))
        actions.append(Action(ActionKind.FLUSH_STATES, index, slots[index]))
        if waiting:
            following = waiting.pop(0)
            actions.append(Action(ActionKind.PREFETCH, following, slots[following]))
    return actions


def insert_waits(actions: Sequence[Action]) -> list[Action]:
    """Add the wait of every dependency that lane order and the waits before it do not imply already."""
    needs = dependencies(actions)
    clocks = Clocks()
    lowered = []
    for action in actions:
        waits: tuple[str, ...] = ()
        start = clocks.before(action)
        # Latest producer first: its clock may cover the others.
        for producer in reversed(needs[action.name]):
            if not clocks.finished_by(start, producer):
                waits = (producer.name, *waits)
                start = clocks.before(action, waits)
        clocks.issue(action, start)
        lowered.append(Action(action.kind, action.sub_group, action.slot, waits) if waits else action)
    return lowered


def serial_schedule(placements: Sequence[Placement]) -> Schedule:
    """Each action waits for the one before it. ``RESIDENT`` sub-groups are Twin-Flow's; nothing is streamed."""
    assert Placement.STREAMED not in placements
    actions: list[Action] = []
    for sub_group, placement in enumerate(placements):
        for kind in CHAINS[placement]:
            # What is earlier on the same lane needs no wait.
            waits = tuple(before.name for before in actions[-1:] if before.lane is not kind.lane)
            actions.append(Action(kind, sub_group, waits=waits))
    return Schedule(num_slots=0, slot_numel=0, staging_bytes=0, actions=tuple(actions))
