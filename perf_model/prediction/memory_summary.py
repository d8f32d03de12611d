"""Summarize the memory that a plan needs, one line per placement, for the log of a training run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from perf_model.prediction.memory import MemoryKind, Reservation
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import STAGED_BYTES_PER_PARAM
from perf_model.units import size


def summary_by_placement(plan: UpdatePlan, widths: Widths) -> list[str]:
    """Return one line per placement of the plan, with the bytes of one rank."""
    return [
        f"{placement.value}: {_counted(plan.placements.count(placement), 'unit')}, "
        f"{plan.numel(placement):,} parameters, {', '.join(_taken(plan, widths, placement))}"
        for placement in Placement
        if placement in plan.placements
    ]


def total_reserved(reservations: Iterable[Reservation]) -> str:
    """Return the bytes that one rank has reserved, by kind of memory.

    They include gradient accumulators and staging buffers, which belong to no placement.
    """
    taken_bytes = dict.fromkeys(MemoryKind, 0)
    for reservation in reservations:
        taken_bytes[reservation.kind] += reservation.count * reservation.each_bytes
    names = {MemoryKind.PINNED: "of page-locked host memory", MemoryKind.ACCELERATOR: "on the accelerator"}
    return ", ".join(f"{size(taken_bytes[kind])} {name}" for kind, name in names.items())


def _taken(plan: UpdatePlan, widths: Widths, placement: Placement) -> Iterator[str]:
    yield f"{size(sum(widths.on_host.values()) * plan.numel(placement))} of host memory"
    if placement is Placement.CPU:
        return
    numel, schedule = plan.numel(placement), plan.schedule
    if placement is Placement.STREAMED:
        slots = _counted(schedule.num_slots, "slot")
        states = f"{slots} of {size(STAGED_BYTES_PER_PARAM * schedule.slot_numel)}"
    else:
        states = f"{size(STAGED_BYTES_PER_PARAM * numel)} of states"
    yield f"on the accelerator {states} and {size(widths.grad * numel)} of gradients"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
