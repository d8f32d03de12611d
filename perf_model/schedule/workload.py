"""Describe the work of one update: the units of one rank, and the optimizer states of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from perf_model.schedule.placement import Placement

STATES = ("master", "exp_avg", "exp_avg_sq")
"""The fp32 tensors that Adam keeps for each parameter: the parameter itself (p) and its two moments (m and v)."""

FP32_BYTES = 4


@dataclass(frozen=True)
class Partition:
    """One rank's part of a parameter: ``numel`` elements, padding included."""

    name: str
    numel: int


@dataclass(frozen=True)
class Unit:
    """A run of elements of one ZeRO-3 sub-group: the piece of the optimizer states that a schedule places and updates.

    It has ``numel`` elements of this rank's partition of the sub-group with index ``sub_group``, from element ``begin``
    on, padding included. ``label`` names the layers that it is from. ``fixed`` is the placement that a rule gives it,
    None if the planner decides. ``used_numel`` are the elements that forward uses from its first use of this unit until
    that of the next one; None stands for ``numel``, if it uses no parameter again in between.
    """

    index: int
    numel: int
    sub_group: int
    begin: int = 0
    label: str = ""
    fixed: Placement | None = None
    used_numel: int | None = None

    @property
    def end(self) -> int:
        """Return the position in the sub-group after the last element."""
        return self.begin + self.numel

    @property
    def forward_numel(self) -> int:
        """Return the elements that forward uses before it needs the next unit: its work, in parameters."""
        return self.numel if self.used_numel is None else self.used_numel


@dataclass(frozen=True)
class Workload:
    """The units of one rank, in the order of their elements.

    The units of one sub-group cover all of its elements, and the sub-groups are in DeepSpeed's order
    (``optimizer.fp16_groups``).
    """

    units: tuple[Unit, ...]

    @classmethod
    def from_numels(cls, numels: Iterable[int]) -> Workload:
        """Return the workload of sub-groups of these lengths, in parameters, of which each is one unit."""
        return cls(tuple(Unit(index, numel, sub_group=index) for index, numel in enumerate(numels)))

    @classmethod
    def from_parameters(cls, parameters: Iterable[int], world_size: int, sub_group_size: int) -> Workload:
        """Return one rank's workload in which each of DeepSpeed's sub-groups is one unit.

        ``parameters`` are the numbers of elements of the tensors of one param group.
        """
        partitions = (Partition("", -(-numel // world_size)) for numel in parameters)
        groups = form_sub_groups(partitions, sub_group_size)
        return cls.from_numels([sum(partition.numel for partition in group) for group in groups])

    @cached_property
    def sub_group_numels(self) -> tuple[int, ...]:
        """Return the length of this rank's partition of each sub-group."""
        numels = [0] * (1 + max((unit.sub_group for unit in self.units), default=-1))
        for unit in self.units:
            numels[unit.sub_group] += unit.numel
        return tuple(numels)

    @cached_property
    def numel(self) -> int:
        """Return the number of parameters of this rank, padding included."""
        return sum(unit.numel for unit in self.units)

    @cached_property
    def forward_numel(self) -> int:
        """Return the elements that forward uses, each as often as it does."""
        return sum(unit.forward_numel for unit in self.units)


def form_sub_groups(partitions: Iterable[Partition], sub_group_size: int) -> list[list[Partition]]:
    """Return one rank's sub-groups as DeepSpeed 0.19.8 forms them (``stage3.py``, ``_create_fp16_sub_groups``).

    ``partitions`` are those of one param group: each parameter is divided among the ranks and padded. The parameter
    with which a sub-group reaches ``sub_group_size`` is the last one in it.
    """
    sub_groups: list[list[Partition]] = []
    numel = sub_group_size
    for partition in partitions:
        if numel >= sub_group_size:
            sub_groups.append([])
            numel = 0
        sub_groups[-1].append(partition)
        numel += partition.numel
    return sub_groups
