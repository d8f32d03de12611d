"""Describe the work of one update: the sub-groups of one rank, and the optimizer states of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

STATES = ("master", "exp_avg", "exp_avg_sq")
"""The fp32 tensors that Adam keeps for each sub-group: the parameters (p) and their two moments (m and v)."""

FP32_BYTES = 4


@dataclass(frozen=True)
class SubGroup:
    """One ZeRO-3 sub-group. ``numel`` is the length of this rank's partition of it, padding included."""

    index: int
    numel: int


@dataclass(frozen=True)
class Workload:
    """The sub-groups of one rank, in DeepSpeed's order (``optimizer.fp16_groups``)."""

    sub_groups: tuple[SubGroup, ...]

    @classmethod
    def from_numels(cls, numels: list[int]) -> Workload:
        """Return the workload whose sub-groups have these lengths, in parameters."""
        return cls(tuple(SubGroup(index, numel) for index, numel in enumerate(numels)))

    @classmethod
    def from_parameters(cls, parameters: Iterable[int], world_size: int, sub_group_size: int) -> Workload:
        """Return one rank's sub-groups as DeepSpeed 0.19.8 forms them (``stage3.py``, ``_create_fp16_sub_groups``).

        ``parameters`` are the numbers of elements of the tensors of one param group. Each is divided among the ranks
        and padded. The parameter with which a sub-group reaches ``sub_group_size`` is the last one in it.
        """
        numels, open_numel = [], 0
        for numel in parameters:
            open_numel += -(-numel // world_size)
            if open_numel >= sub_group_size:
                numels.append(open_numel)
                open_numel = 0
        return cls.from_numels([*numels, open_numel] if open_numel else numels)

    @property
    def numel(self) -> int:
        """Return the number of parameters of this rank, padding included."""
        return sum(sub_group.numel for sub_group in self.sub_groups)
