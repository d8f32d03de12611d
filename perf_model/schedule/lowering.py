"""Lower a placement to a schedule: order the units, assign slots, order the actions and insert the waits."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from perf_model.schedule.action import Action, ActionKind
from perf_model.schedule.happens_before import CHAINS, EAGER_CHAIN, Clocks, dependencies
from perf_model.schedule.placement import Placement
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.workload import Workload


def lower(
    workload: Workload,
    placements: Sequence[Placement],
    num_slots: int,
    order: Sequence[int],
    eager: Collection[int] = (),
) -> Schedule:
    """Return the schedule that executes ``placements`` in the given order of the units, of which some are ``eager``."""
    streamed = [index for index in order if placements[index] is Placement.STREAMED]
    num_slots = min(num_slots, len(streamed))
    return Schedule(
        num_slots=num_slots,
        slot_numel=max((workload.units[index].length for index in streamed), default=0),
        actions=tuple(insert_waits(issue_order(order, placements, assign_slots(streamed, num_slots), eager))),
    )


def forward_order(
    workload: Workload, placements: Sequence[Placement], first_use: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return an order in which forward finds the units of each placement ready in the order of their first use.

    ``first_use`` defaults to the order of the indices. Resident units come first. The others are ordered by the share
    of their placement that is done when a CPU unit is done, or a streamed one half done, so all lanes finish together.
    """
    in_order = list(range(len(placements)) if first_use is None else first_use)
    if (persistent := workload.persistent_unit) is not None:
        # First: ``step()`` waits for it.
        in_order.remove(persistent)
        in_order.insert(0, persistent)
    due: list[tuple[float, bool, int]] = []
    for placement in (Placement.CPU, Placement.STREAMED):
        on_cpu = placement is Placement.CPU
        indices = [index for index in in_order if placements[index] is placement]
        total, done = sum(workload.units[index].numel for index in indices), 0
        for index in indices:
            numel = workload.units[index].numel
            done += numel
            due.append(((done if on_cpu else done - numel / 2) / total, on_cpu, index))
    residents = (index for index in in_order if placements[index] is Placement.RESIDENT)
    return (*residents, *(index for _, _, index in sorted(due)))


def assign_slots(streamed: Sequence[int], num_slots: int) -> dict[int, int]:
    """Return the slot of each streamed unit, round robin."""
    return {index: position % num_slots for position, index in enumerate(streamed)}


def issue_order(
    order: Sequence[int], placements: Sequence[Placement], slots: dict[int, int], eager: Collection[int] = ()
) -> list[Action]:
    """Return the actions, without waits, in the order in which the host issues them.

    CPU units come first, so that the CPU lane is never idle. A prefetch follows the flush that frees its slot, so that
    the h2d lane runs ahead by the number of slots.
    """
    on_cpu = [index for index in order if placements[index] is Placement.CPU]
    streamed = [index for index in order if placements[index] is Placement.STREAMED]
    num_slots = max(slots.values(), default=-1) + 1
    actions = [
        Action(kind, index) for index in on_cpu for kind in (EAGER_CHAIN if index in eager else CHAINS[Placement.CPU])
    ]
    actions.extend(Action(ActionKind.PREFETCH, index, slots[index]) for index in streamed[:num_slots])
    waiting = streamed[num_slots:]
    for index in order:
        if placements[index] is Placement.CPU:
            continue
        actions.append(Action(ActionKind.GPU_STEP, index, slots.get(index)))
        if placements[index] is Placement.STREAMED:
            actions.append(Action(ActionKind.FLUSH_STATES, index, slots[index]))
            if waiting:
                following = waiting.pop(0)
                actions.append(Action(ActionKind.PREFETCH, following, slots[following]))
    return actions


def insert_waits(actions: Sequence[Action]) -> list[Action]:
    """Return the actions with a wait for each dependency that lane order and the earlier waits do not imply."""
    needs = dependencies(actions)
    clocks = Clocks()
    lowered = []
    for action in actions:
        waits: tuple[str, ...] = ()
        start = clocks.start_clock(action)
        # Start with the latest producer: its clock may cover the others.
        for producer in reversed(needs[action.name]):
            if not clocks.has_finished(producer, start):
                waits = (producer.name, *waits)
                start = clocks.start_clock(action, waits)
        clocks.issue(action, start)
        lowered.append(Action(action.kind, action.unit, action.slot, waits) if waits else action)
    return lowered


def serial_schedule(placements: Sequence[Placement]) -> Schedule:
    """Return the schedule of stock DeepSpeed or Twin-Flow: each action waits for the action before it."""
    assert Placement.STREAMED not in placements
    actions: list[Action] = []
    for unit, placement in enumerate(placements):
        for kind in CHAINS[placement]:
            waits = tuple(before.name for before in actions[-1:] if before.lane is not kind.lane)
            actions.append(Action(kind, unit, waits=waits))
    return Schedule(num_slots=0, slot_numel=0, actions=tuple(actions))
