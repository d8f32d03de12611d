"""Define ``UpdatePlan``, and place units by simple rules."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from perf_model.schedule.lowering import forward_order, lower
from perf_model.schedule.placement import Placement
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.workload import Workload
from perf_model.units import counted

DEFAULT_NUM_SLOTS = 2
"""Two slots let transfers overlap with updates."""


@dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """A placement for each unit of ``workload``, and at most ``num_slots`` slots for the streamed ones.

    The host processes the units in ``order``, which defaults to ``forward_order``. The ``eager`` units have two
    versions of their states, so that their updates may run in backward. Raise ``ValueError`` if placements, slots,
    order or eager units are invalid, or if the persistent unit or one on disk is not on the CPU.
    """

    workload: Workload
    placements: tuple[Placement, ...]
    num_slots: int
    order: tuple[int, ...] | None = None
    eager: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if len(self.placements) != (count := len(self.workload.units)):
            rule = f"A plan has one placement per unit: {count} units"
            raise ValueError(f"{rule}, found {len(self.placements)} placements.")
        placed = zip(self.workload.units, self.placements, strict=True)
        of_cpu = (each for each in placed if each[0].is_persistent or each[0].is_on_disk)
        if wrong := [unit.index for unit, placement in of_cpu if placement is not Placement.CPU]:
            raise ValueError(f"The CPU updates persistent parameters and units on disk, found others: {wrong}.")
        if self.num_slots < 1:
            raise ValueError(f"A plan has at least 1 slot, found {self.num_slots}.")
        if self.order is not None and sorted(self.order) != list(range(len(self.placements))):
            raise ValueError(f"A plan's order names each of its {len(self.placements)} units once, found {self.order}.")
        if self.eager and (wrong := sorted(self.eager - self.eligible_as_eager)):
            rule = "Eager units are not resident, and neither the persistent unit nor one on disk is eager"
            raise ValueError(f"{rule}, found {wrong}.")

    @cached_property
    def schedule(self) -> Schedule:
        """Return the actions, lowered on first use, because the planner discards many plans without them."""
        order = self.order or forward_order(self.workload, self.placements)
        return lower(self.workload, self.placements, self.num_slots, order, self.eager)

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash that is equal on two ranks if they execute the same actions on the same elements."""
        borders = " ".join(
            "+".join(f"{run.sub_group}:{run.begin}:{run.end}" for run in unit.ranges) for unit in self.workload.units
        )
        return hashlib.sha256(f"{borders}\n{self.schedule}".encode()).hexdigest()[:16]

    @cached_property
    def lengths(self) -> Mapping[Placement, Counter[int]]:
        """Return by placement the number of units of each length in memory."""
        counts: dict[Placement, Counter[int]] = {placement: Counter() for placement in Placement}
        for unit, placement in zip(self.workload.units, self.placements, strict=True):
            counts[placement][unit.length] += 1
        return counts

    @property
    def eligible_as_eager(self) -> frozenset[int]:
        """Return the units that may be eager: not the persistent one, which ``step()`` waits for."""
        return frozenset(
            unit.index
            for unit, placement in zip(self.workload.units, self.placements, strict=True)
            if placement is not Placement.RESIDENT and not (unit.is_persistent or unit.is_on_disk)
        )

    @property
    def eager_numel(self) -> int:
        """Return the number of this rank's parameters in eager units."""
        return sum(self.workload.units[unit].numel for unit in self.eager)

    def numel(self, placement: Placement) -> int:
        """Return the number of this rank's parameters with that placement."""
        placed = zip(self.workload.units, self.placements, strict=True)
        return sum(unit.numel for unit, found in placed if found is placement)

    @property
    def largest_on_accelerator(self) -> int:
        """Return the length of the largest unit that is updated on the accelerator."""
        return max([0, *self.lengths[Placement.STREAMED], *self.lengths[Placement.RESIDENT]])

    def __str__(self) -> str:
        counts = ", ".join(
            f"{self.placements.count(placement)} {placement.value}"
            for placement in Placement
            if placement in self.placements
        )
        share = 1 - self.numel(Placement.CPU) / max(1, self.workload.numel)
        slots = counted(self.schedule.num_slots, "slot")
        return (
            f"{counted(len(self.placements), 'unit')}, {self.workload.numel:,} parameters: {counts} "
            f"({share:.0%} of the parameters updated on the GPU), "
            f"{f'{self.eager_numel:,} parameters eager, ' if self.eager else ''}"
            f"{f'{on_disk:,} parameters on disk, ' if (on_disk := self.workload.on_disk_numel) else ''}"
            f"{f'{slots} of {self.schedule.slot_numel:,}, ' if self.schedule.num_slots else ''}plan {self.fingerprint}"
        )


def place_all(workload: Workload, placement: Placement) -> tuple[Placement, ...]:
    """Return ``placement`` for every unit except the persistent one and those on disk, which are on the CPU."""
    return tuple(Placement.CPU if unit.is_persistent or unit.is_on_disk else placement for unit in workload.units)


def place_by_stride(workload: Workload, stride: int) -> tuple[Placement, ...]:
    """Stream each unit i with (i + 1) % stride == 0, not counting the persistent one (arXiv 2410.21316)."""
    first = 0 if workload.persistent_unit is None else 1
    streamed = enumerate(place_all(workload, Placement.STREAMED))
    return tuple(place if (unit - first + 1) % stride == 0 else Placement.CPU for unit, place in streamed)


def in_forward_order(plan: UpdatePlan, first_use: Sequence[int] | None) -> UpdatePlan:
    """Return ``plan`` with its units in the order ``first_use``, which defaults to the order of the indices."""
    return replace(plan, order=None if first_use is None else forward_order(plan.workload, plan.placements, first_use))


def least_plan(workload: Workload) -> UpdatePlan:
    """Return the plan with the least memory, in which the CPU updates every unit that is not fixed."""
    placements = tuple(unit.fixed or Placement.CPU for unit in workload.units)
    return UpdatePlan(workload=workload, placements=placements, num_slots=1)
