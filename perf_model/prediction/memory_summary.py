"""The memory that a plan takes, a line per placement, for the log of a training run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from perf_model.prediction.memory import Reservation, Where
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import STAGED_BYTES_PER_PARAM, bytes_of_slots
from perf_model.units import size


def inventory(plan: UpdatePlan, widths: Widths) -> list[str]:
    """Return a line for each placement of the plan, with the bytes of one rank."""
    return [
        f"{placement.value}: {_counted(plan.placements.count(placement), 'sub-group')}, "
        f"{plan.numel(placement):,} parameters, {', '.join(_taken(plan, widths, placement))}"
        for placement in Placement
        if placement in plan.placements
    ]


def reserved_in_all(reservations: Iterable[Reservation]) -> str:
    """Return the bytes of all that one rank has reserved, by memory: sums of gradients and staging buffers, too, which
    belong to no placement."""
    taken_bytes = dict.fromkeys(Where, 0)
    for reservation in reservations:
        taken_bytes[reservation.where] += reservation.count * reservation.each_bytes
    names = {Where.PINNED: "of page-locked host memory", Where.ACCELERATOR: "on the accelerator"}
    return ", ".join(f"{size(taken_bytes[where])} {name}" for where, name in names.items())


def _taken(plan: UpdatePlan, widths: Widths, placement: Placement) -> Iterator[str]:
    if host_bytes := widths.host_bytes(plan, placement):
        yield f"{size(host_bytes)} of host memory"
    if placement is Placement.CPU:
        return
    numel, schedule = plan.numel(placement), plan.schedule
    if placement is Placement.STREAMED:
        slots = _counted(schedule.num_slots, "slot")
        states = f"{slots} of {size(bytes_of_slots(1, schedule.slot_numel))}"
    else:
        states = f"{size(STAGED_BYTES_PER_PARAM * numel)} of states"
    yield f"on the accelerator {states} and {size(widths.grad * numel)} of gradients"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
