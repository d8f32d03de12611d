"""What there is to update: the sub-groups of one rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SubGroup:
    """One ZeRO-3 sub-group: ``numel`` is the length of this rank's partition, padding included."""

    index: int
    numel: int


@dataclass(frozen=True)
class Workload:
    """The sub-groups in DeepSpeed's order (``optimizer.fp16_groups``)."""

    sub_groups: tuple[SubGroup, ...]

    @classmethod
    def of(cls, numels: list[int]) -> Workload:
        return cls(tuple(SubGroup(index, numel) for index, numel in enumerate(numels)))

    @property
    def numel(self) -> int:
        return sum(sub_group.numel for sub_group in self.sub_groups)
