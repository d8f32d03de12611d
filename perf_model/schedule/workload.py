"""Define the work of one update: the units of one rank, and the optimizer states of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from perf_model.schedule.placement import Placement

STATES = ("master", "exp_avg", "exp_avg_sq")
"""The tensors of Adam: the master weights (p) and the two moments (m and v), fp32 by default."""

FP32_BYTES = 4

ALIGNMENT = 16
"""Wide loads start at multiples of this many elements. In each memory, a range starts as far after one."""


@dataclass(frozen=True)
class Partition:
    """One rank's part of a parameter, padding included. DeepSpeed keeps a *persistent* parameter gathered.

    The states of one that ``is_on_disk`` live in a file, and in host memory only during their update.
    """

    name: str
    numel: int
    is_persistent: bool = False
    is_on_disk: bool = False


@dataclass(frozen=True)
class Range:
    """A run of ``numel`` elements of this rank's partition of a sub-group, from element ``begin`` on."""

    sub_group: int
    begin: int
    numel: int

    @property
    def end(self) -> int:
        return self.begin + self.numel


@dataclass(frozen=True)
class Unit:
    """The piece of the optimizer states that a schedule places and updates: ``ranges``, padding included.

    The *persistent unit*, the first one, contains all persistent parameters. The CPU updates it, and ``step()`` waits
    until it is published. ``fixed`` is the placement of a rule, None if the planner decides. ``used_numel`` is the
    number of elements that forward uses from the first use of this unit until the first use of the next. It defaults to
    ``numel``. The CPU updates a unit ``is_on_disk``, in a disk slot.
    """

    index: int
    ranges: tuple[Range, ...]
    label: str = ""
    fixed: Placement | None = None
    used_numel: int | None = None
    is_persistent: bool = False
    is_on_disk: bool = False

    @cached_property
    def numel(self) -> int:
        return sum(run.numel for run in self.ranges)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Return where each range begins in the accelerator memory of the unit, in elements."""
        offsets, end = [], 0
        for run in self.ranges:
            offsets.append(end + (run.begin - end) % ALIGNMENT)
            end = offsets[-1] + run.numel
        return tuple(offsets)

    @property
    def length(self) -> int:
        """Return the elements of that memory: ``numel`` and the gaps before ranges."""
        return self.offsets[-1] + self.ranges[-1].numel

    @property
    def forward_numel(self) -> int:
        """Return the elements that forward uses before it needs the next unit."""
        return self.numel if self.used_numel is None else self.used_numel


@dataclass(frozen=True)
class Workload:
    """The units of one rank in the order of their elements, which cover each sub-group of DeepSpeed's optimizer.

    ``first_use`` is the order in which forward first uses them. It defaults to the order of the indices.
    """

    units: tuple[Unit, ...]
    first_use: tuple[int, ...] | None = None

    @classmethod
    def from_numels(cls, numels: Iterable[int]) -> Workload:
        """Return the workload of sub-groups of these lengths, with one unit each."""
        return cls(tuple(Unit(index, (Range(index, 0, numel),)) for index, numel in enumerate(numels)))

    @property
    def in_order_of_use(self) -> tuple[Unit, ...]:
        return self.units if self.first_use is None else tuple(self.units[index] for index in self.first_use)

    @cached_property
    def sub_group_numels(self) -> tuple[int, ...]:
        ranges = [run for unit in self.units for run in unit.ranges]
        numels = [0] * (1 + max((run.sub_group for run in ranges), default=-1))
        for run in ranges:
            numels[run.sub_group] += run.numel
        return tuple(numels)

    @property
    def persistent_unit(self) -> int | None:
        """Return the index of the persistent unit, None if DeepSpeed keeps no parameter gathered."""
        return 0 if self.units and self.units[0].is_persistent else None

    @cached_property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)

    @cached_property
    def on_disk_numel(self) -> int:
        return sum(unit.numel for unit in self.units if unit.is_on_disk)

    @cached_property
    def known_disk_bytes(self) -> dict[Any, Any]:
        """Return the results of ``Widths.disk_bytes`` so far."""
        return {}

    @cached_property
    def forward_numel(self) -> int:
        """Return the elements that forward uses, each as often as it does."""
        return sum(unit.forward_numel for unit in self.units)


def form_sub_groups(partitions: Iterable[Partition], sub_group_size: int) -> list[list[Partition]]:
    """Return the sub-groups of one param group, as in DeepSpeed 0.19.8 (``_create_fp16_sub_groups``)."""
    sub_groups: list[list[Partition]] = []
    numel = sub_group_size
    for partition in partitions:
        if numel >= sub_group_size:
            sub_groups.append([])
            numel = 0
        sub_groups[-1].append(partition)
        numel += partition.numel
    return sub_groups
