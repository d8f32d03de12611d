"""What there is to update: the sub-groups of one rank."""

from __future__ import annotations

from collections.abc import Iterable
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

    @classmethod
    def of_parameters(cls, parameters: Iterable[int], world_size: int, sub_group_size: int) -> Workload:
        """One rank's sub-groups, as DeepSpeed 0.19.8 cuts them (``stage3.py``, ``_create_fp16_sub_groups``).

        ``parameters`` are the numbers of elements of one param group's tensors; each is divided among the ranks and
        padded. A sub-group is closed by the parameter with which it reaches ``sub_group_size``.
        """
        numels, open_numel = [], 0
        for numel in parameters:
            open_numel += -(-numel // world_size)
            if open_numel >= sub_group_size:
                numels.append(open_numel)
                open_numel = 0
        return cls.of([*numels, open_numel] if open_numel else numels)

    @property
    def numel(self) -> int:
        return sum(sub_group.numel for sub_group in self.sub_groups)
