"""Compute when forward needs each unit, from the order in which it uses the parameters.

Layers that share parameters need all of them in the first pass, and later parameters only after the last one. For
example, 5 layers share a parameter of 100 elements, between an embedding and a head of 100 elements each::

    used           embedding  layer  layer  layer  layer  layer  head
    unit           embedding  layer                              head
    needed after   0          100                                600    elements
    forward_numel  100        500                                100
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from perf_model.schedule.cutting import partitions_in
from perf_model.schedule.workload import Partition, Unit, Workload


class ParameterUses:
    """The elements that forward has used before it first needs a unit.

    ``uses`` contains names of parameters in order of use, once per use. Those outside of ``sub_groups`` do not count.
    """

    def __init__(self, sub_groups: Sequence[Sequence[Partition]], uses: Sequence[str]) -> None:
        self._sub_groups = sub_groups
        self._used_numel = 0
        self._used_before: dict[str, int] = {}
        numels = {partition.name: partition.numel for partitions in sub_groups for partition in partitions}
        known = [name for name in uses if name in numels]
        for name in known:
            self._used_before.setdefault(name, self._used_numel)
            self._used_numel += numels[name]
        self._repeats = len(self._used_before) < len(known)

    def arrange(self, workload: Workload) -> Workload:
        """Return ``workload`` with ``first_use``, unused units last, and ``used_numel`` if a parameter is reused."""
        in_order, units = sorted(workload.units, key=self._needed_after), list(workload.units)
        if self._repeats:
            needed_after = [*map(self._needed_after, in_order), self._used_numel]
            for unit, (begin, end) in zip(in_order, pairwise(needed_after), strict=True):
                units[unit.index] = replace(unit, used_numel=end - begin)
        return Workload(tuple(units), first_use=tuple(unit.index for unit in in_order))

    def _needed_after(self, unit: Unit) -> int:
        if unit.is_persistent:
            return 0
        used = [
            self._used_before[partition.name] + before
            for partition, before in partitions_in(unit, self._sub_groups)
            if partition.name in self._used_before
        ]
        return min(used, default=self._used_numel)
