"""Lowering passes: placement -> chains -> slots -> issue order -> waits. Pure functions, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from perf_model.action import Action, ActionKind
from perf_model.dependencies import dependencies
from perf_model.happens_before import Clocks
from perf_model.placement import Placement
from perf_model.schedule import Schedule
from perf_model.workload import Workload


def lower(workload: Workload, placements: Sequence[Placement], num_slots: int) -> Schedule:
    """The schedule that executes ``placements``; never more slots than streamed sub-groups."""
    order = spread_streamed(workload, placements)
    streamed = [index for index in order if placements[index] is Placement.STREAMED]
    slots = assign_slots(streamed, num_slots)
    actions = insert_waits(issue_order(order, placements, slots))
    return Schedule(
        num_slots=min(num_slots, len(streamed)),
        slot_numel=max((workload.sub_groups[index].numel for index in streamed), default=0),
        actions=tuple(actions),
    )


def spread_streamed(workload: Workload, placements: Sequence[Placement]) -> list[int]:
    """Sub-group indices in update order: each placement in its own order, merged by progress.

    Both lanes are to finish together, so the next sub-group is of the placement that is further behind in
    its own parameters; the host then blocks on a CPU update only after it has issued a fair share of the
    streamed ones.
    """
    progress: list[tuple[float, int]] = []
    for placement in Placement:
        indices = [index for index, its in enumerate(placements) if its is placement]
        total = sum(workload.sub_groups[index].numel for index in indices)
        seen = 0
        for index in indices:
            numel = workload.sub_groups[index].numel
            progress.append(((seen + numel / 2) / total, index))
            seen += numel
    return [index for _, index in sorted(progress)]


def assign_slots(streamed: Sequence[int], num_slots: int) -> dict[int, int]:
    """Slot of each streamed sub-group, round robin in update order."""
    return {index: position % num_slots for position, index in enumerate(streamed)}


def issue_order(order: Sequence[int], placements: Sequence[Placement], slots: dict[int, int]) -> list[Action]:
    """Actions, without waits, in the order the host issues them.

    A prefetch is issued as soon as the flush that frees its slot has been, so the h2d lane runs ahead by the
    number of slots. A CPU update is published only after the next one is queued, so the CPU lane never idles
    while the host waits for it.
    """
    streamed = [index for index in order if placements[index] is Placement.STREAMED]
    num_slots = max(slots.values(), default=-1) + 1
    actions = [Action(ActionKind.PREFETCH, index, slots[index]) for index in streamed[:num_slots]]
    waiting = streamed[num_slots:]
    unpublished: list[int] = []
    for index in order:
        if placements[index] is Placement.STREAMED:
            actions.append(Action(ActionKind.GPU_STEP, index, slots[index]))
            actions.append(Action(ActionKind.FLUSH_STATES, index, slots[index]))
            if waiting:
                following = waiting.pop(0)
                actions.append(Action(ActionKind.PREFETCH, following, slots[following]))
        else:
            actions.append(Action(ActionKind.CPU_STEP, index))
            actions.extend(Action(ActionKind.PUBLISH, previous) for previous in unpublished)
            unpublished = [index]
    actions.extend(Action(ActionKind.PUBLISH, index) for index in unpublished)
    return actions


def insert_waits(actions: Sequence[Action]) -> list[Action]:
    """Add the wait of every dependency that lane order and the waits before it do not imply already."""
    needs = dependencies(actions)
    clocks = Clocks()
    lowered = []
    for action in actions:
        waits: tuple[str, ...] = ()
        # Latest producer first: its clock may cover the others.
        for producer in reversed(needs[action.name]):
            if not clocks.finished_by(clocks.before(action, waits), producer):
                waits = (producer.name, *waits)
        action = replace(action, waits=waits)
        clocks.issue(action)
        lowered.append(action)
    return lowered
