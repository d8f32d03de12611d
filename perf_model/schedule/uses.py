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


def with_uses(workload: Workload, sub_groups: Sequence[Sequence[Partition]], uses: Sequence[str]) -> Workload:
    """Return ``workload`` with ``first_use``, unused units last, and ``used_numel`` if a parameter is reused.

    ``uses`` contains names of parameters in order of use, once per use. Names outside of ``sub_groups`` do not count.
    """
    numels = {partition.name: partition.numel for partitions in sub_groups for partition in partitions}
    known = [name for name in uses if name in numels]
    used_before: dict[str, int] = {}
    used_numel = 0
    for name in known:
        used_before.setdefault(name, used_numel)
        used_numel += numels[name]

    def needed_after(unit: Unit) -> int:
        if unit.is_persistent:
            return 0
        found = partitions_in(unit, sub_groups)
        used = [used_before[partition.name] + before for partition, before in found if partition.name in used_before]
        return min(used, default=used_numel)

    in_order, units = sorted(workload.units, key=needed_after), list(workload.units)
    if len(used_before) < len(known):
        moments = [*map(needed_after, in_order), used_numel]
        for unit, (begin, end) in zip(in_order, pairwise(moments), strict=True):
            units[unit.index] = replace(unit, used_numel=end - begin)
    return Workload(tuple(units), first_use=tuple(unit.index for unit in in_order))
