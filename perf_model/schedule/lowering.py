"""Lower a placement to a schedule: order the units, assign slots, and order the actions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

from perf_model.schedule.action import Action, ActionKind
from perf_model.schedule.happens_before import CHAINS, DISK_CHAIN, EAGER_CHAINS, insert_waits
from perf_model.schedule.host_layout import NUM_DISK_SLOTS
from perf_model.schedule.placement import Placement
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.slots import assign_slots, in_order_of_slots, through_slots
from perf_model.schedule.workload import Workload

CPU_PER_DISK = 4
"""The parameters that the CPU updates while a disk reads and writes one: of other units, before each unit on disk."""


def lower(
    workload: Workload, placements: Sequence[Placement], num_slots: int, order: Sequence[int], eager: Collection[int]
) -> Schedule:
    """Return the schedule that executes ``placements`` in the given order of the units, of which some are ``eager``.

    CPU units come first, so that the CPU lane is never idle. A prefetch follows the flush that frees its slot, so that
    the h2d lane runs ahead by the number of slots, and the read of a unit on disk follows the write that frees its own.
    Streamed units that are eager come first, because backward updates them.
    """
    streamed = in_order_of_slots(order, placements, eager)
    on_disk = [index for index in order if workload.units[index].is_on_disk]
    num_slots, num_disk_slots = min(num_slots, len(streamed)), min(NUM_DISK_SLOTS, len(on_disk))
    slots, disk_slots = assign_slots(streamed, num_slots), assign_slots(on_disk, num_disk_slots)
    actions, to_read = list[Action](), iter(on_disk)

    def read(count: int) -> None:
        actions.extend(Action(ActionKind.READ, index, disk_slots[index]) for index in islice(to_read, count))

    read(num_disk_slots)
    for index in order:
        if placements[index] is not Placement.CPU:
            continue
        if index in disk_slots:
            actions += [Action(kind, index, disk_slots[index]) for kind in DISK_CHAIN[1:]]
            read(1)
        else:
            chains = EAGER_CHAINS if index in eager else CHAINS
            actions += [Action(kind, index) for kind in chains[Placement.CPU]]
    early = [index for index in streamed if index in eager]
    others = (index for index in order if placements[index] is not Placement.CPU and index not in early)
    actions += through_slots([*early, *others], slots, eager, adopts=False)
    # After the prefetches of units that forward needs earlier.
    actions.extend(Action(ActionKind.ADOPT, index, slots[index]) for index in reversed(early))
    return Schedule(
        num_slots=num_slots,
        slot_numel=max((workload.units[index].length for index in streamed), default=0),
        num_disk_slots=num_disk_slots,
        actions=tuple(insert_waits(actions)),
    )


def forward_order(
    workload: Workload, placements: Sequence[Placement], first_use: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return an order in which forward finds the units of each placement ready in the order of their first use.

    ``first_use`` defaults to the order of the indices. Resident units come first. The others are ordered by the share
    of their placement that is done when a CPU unit is done, or a streamed one half done, so all lanes finish together.
    Before each unit on disk, the CPU updates ``CPU_PER_DISK`` times as many parameters of others, while there are some.
    """
    units, due = workload.units, list[tuple[float, bool, int, int]]()
    # The persistent unit comes first: ``step()`` waits for it.
    order = range(len(units)) if first_use is None else first_use
    in_order = sorted(order, key=lambda index: not units[index].is_persistent)
    on_host = [index for index in in_order if not units[index].is_on_disk]
    of_cpu = sum(units[index].numel for index in on_host if placements[index] is Placement.CPU)
    passed = 0
    for index in (each for each in in_order if units[each].is_on_disk):
        passed += units[index].numel
        due.append((min(1.0, CPU_PER_DISK * passed / max(1, of_cpu)), True, passed, index))
    for placement in (Placement.CPU, Placement.STREAMED):
        on_cpu = placement is Placement.CPU
        indices = [index for index in on_host if placements[index] is placement]
        total, done = sum(units[index].numel for index in indices), 0
        for index in indices:
            numel = units[index].numel
            done += numel
            due.append(((done if on_cpu else done - numel / 2) / total, on_cpu, 0, index))
    residents = (index for index in in_order if placements[index] is Placement.RESIDENT)
    return (*residents, *(index for *_, index in sorted(due)))


def serial_schedule(placements: Sequence[Placement]) -> Schedule:
    """Return the schedule of stock DeepSpeed or Twin-Flow: each action waits for the action before it."""
    assert Placement.STREAMED not in placements
    actions: list[Action] = []
    for unit, placement in enumerate(placements):
        for kind in CHAINS[placement]:
            waits = tuple(before.name for before in actions[-1:] if before.lane is not kind.lane)
            actions.append(Action(kind, unit, waits=waits))
    return Schedule(num_slots=0, slot_numel=0, actions=tuple(actions))
