"""Summarize the memory that a plan needs, for the log of a training run."""

from __future__ import annotations

from collections.abc import Iterable

from perf_model.prediction.memory import MemoryKind, Reservation
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import STAGED_BYTES_PER_PARAM
from perf_model.units import size


def summary_by_placement(plan: UpdatePlan, widths: Widths) -> list[str]:
    """Return one line per placement of the plan, with the bytes of one rank."""
    lines = []
    for placement in Placement:
        numel, count, schedule = plan.numel(placement), plan.placements.count(placement), plan.schedule
        if count == 0:
            continue
        line = f"{placement.value}: {_counted(count, 'unit')}, {numel:,} parameters, "
        line += f"{size(sum(widths.on_host.values()) * numel)} of host memory"
        if placement is Placement.STREAMED:
            slot = size(STAGED_BYTES_PER_PARAM * schedule.slot_numel)
            line += f", on the accelerator {_counted(schedule.num_slots, 'slot')} of {slot}"
        elif placement is Placement.RESIDENT:
            line += f", on the accelerator {size(STAGED_BYTES_PER_PARAM * numel)} of states"
        lines.append(line if placement is Placement.CPU else f"{line} and {size(widths.grad * numel)} of gradients")
    return lines


def total_reserved(reservations: Iterable[Reservation]) -> str:
    """Return the bytes that one rank has reserved, by kind of memory.

    They include gradient accumulators and staging buffers, which belong to no placement.
    """
    taken_bytes = dict.fromkeys(MemoryKind, 0)
    for reservation in reservations:
        taken_bytes[reservation.kind] += reservation.count * reservation.each_bytes
    names = {MemoryKind.PINNED: "of page-locked host memory", MemoryKind.ACCELERATOR: "on the accelerator"}
    return ", ".join(f"{size(taken_bytes[kind])} {name}" for kind, name in names.items())


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
