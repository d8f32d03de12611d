"""An ``UpdatePlan``: a placement for each sub-group, and the slots that streaming goes through."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from perf_model.schedule.lowering import lower
from perf_model.schedule.order import as_forward_needs
from perf_model.schedule.placement import Placement
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.workload import Workload


@dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """``order``: in which the host turns to the sub-groups; None is as forward needs them (``order.py``).

    Raises ``ValueError`` if there is not exactly one placement a sub-group, or no slot, or an order that names not
    each sub-group once.
    """

    workload: Workload
    placements: tuple[Placement, ...]
    num_slots: int
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.placements) != len(self.workload.sub_groups):
            raise ValueError(
                f"A plan has one placement a sub-group: {len(self.workload.sub_groups)} sub-groups, "
                f"found {len(self.placements)} placements."
            )
        if self.num_slots < 1:
            raise ValueError(f"A plan has at least 1 slot, found {self.num_slots}.")
        if self.order is not None and sorted(self.order) != list(range(len(self.placements))):
            raise ValueError(
                f"A plan's order names each of its {len(self.placements)} sub-groups once, found {self.order}."
            )

    @cached_property
    def schedule(self) -> Schedule:
        order = self.order or as_forward_needs(self.workload, self.placements)
        return lower(self.workload, self.placements, self.num_slots, order)

    @cached_property
    def fingerprint(self) -> str:
        """Equal on two ranks exactly if they execute the same actions on sub-groups of the same lengths."""
        numels = " ".join(str(sub_group.numel) for sub_group in self.workload.sub_groups)
        return hashlib.sha256(f"{numels}\n{self.schedule}".encode()).hexdigest()[:16]

    def numel(self, placement: Placement) -> int:
        """Parameters of this rank with that placement."""
        placed = zip(self.workload.sub_groups, self.placements, strict=True)
        return sum(sub_group.numel for sub_group, its in placed if its is placement)

    @property
    def largest_on_accelerator(self) -> int:
        """Return the length of the largest sub-group that is updated on the accelerator, 0 where there is none."""
        placed = zip(self.workload.sub_groups, self.placements, strict=True)
        return max((sub_group.numel for sub_group, where in placed if where is not Placement.CPU), default=0)

    def __str__(self) -> str:
        counts = ", ".join(f"{self.placements.count(its)} {its.value}" for its in Placement if its in self.placements)
        share = 1 - self.numel(Placement.CPU) / max(1, self.workload.numel)
        return (
            f"{len(self.placements)} sub-groups, {self.workload.numel:,} parameters: {counts} "
            f"({share:.0%} of the parameters updated on the GPU), "
            f"{self.schedule.num_slots} slots of {self.schedule.slot_numel:,}, plan {self.fingerprint}"
        )
