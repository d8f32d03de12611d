"""Decide which states are on disk, and cut sub-groups into units: along layers where possible, else into equal pieces.

For example, with units of at most 500 parameters (e: embedding of 700; layers 0 to 3 of 200 each)::

    sub-group 0  [eeeeeee|00|11|22|33]    units  [eeee] [eee] [00 11] [22 33]

Persistent parameters are the first unit, which spans sub-groups. Other units may have several ranges around them. Whole
sub-groups of one layer share a unit while they fit: with ``"sub_group_size": 0``, each parameter is a sub-group.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, chain, groupby

from perf_model.schedule.host_layout import NUM_DISK_SLOTS, PAGE_BYTES, Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Partition, Range, Unit, Workload

BORDER_MULTIPLE = 16
"""Units start at multiples of this many elements, for cache lines and for wide loads of the GPU kernel."""

PIECE_MULTIPLE = 256

SLIVER = 0.05
"""The largest part of a layer that may share a unit with other layers if the rest of the layer is elsewhere."""

DISK_UNIT_SIZE = 10**7
"""The most parameters of a unit on disk: 120 MB of states, which a disk reads as fast as more."""

EDGES_BYTES = 2 * PAGE_BYTES
"""The most bytes of one state of a partition that stay in host memory, because they share pages with others."""

WHOLE_SUB_GROUPS = 10**15
"""The unit size with which every sub-group is one unit, unless rules place parts of it differently."""

_LAYER = re.compile(r"(.*?\.\d+)\.")


@lru_cache(maxsize=2**16)
def layer_of(name: str) -> str:
    """Return the path up to the first number, as in ``model.layers.3``, or else the path of the module."""
    match = _LAYER.match(name)
    return name.rpartition(".")[0] or name if match is None else match[1]


def place_on_disk(
    sub_groups: Sequence[Sequence[Partition]],
    widths: Widths,
    host_bytes: int,
    placement_of: Callable[[str], Placement | None] = lambda name: None,
    disk_unit_size: int = DISK_UNIT_SIZE,
) -> list[list[Partition]]:
    """Return ``sub_groups`` with states on disk until the others, gradients and disk slots fit into ``host_bytes``.

    The last partitions are the first on disk. Persistent ones, the ones that a rule places on the accelerator, and
    the ones of a few pages, which gain nothing there, are never on disk. If too few are left, all of these are.
    """
    placed = [list(partitions) for partitions in sub_groups]
    numel = sum(partition.numel for partitions in placed for partition in partitions)
    excess_bytes = numel * sum(widths.on_host.values()) - host_bytes
    if excess_bytes <= 0:
        return placed
    excess_bytes += NUM_DISK_SLOTS * min(numel, disk_unit_size) * widths.states
    for partitions in reversed(placed):
        for position in reversed(range(len(partitions))):
            partition = partitions[position]
            saved_bytes = partition.numel * widths.states - EDGES_BYTES * len(widths.of_states)
            may_be = not partition.is_persistent and placement_of(partition.name) in (None, Placement.CPU)
            if may_be and saved_bytes > 0 and excess_bytes > 0:
                partitions[position] = replace(partition, is_on_disk=True)
                excess_bytes -= saved_bytes
    return placed


def cut_into_units(
    sub_groups: Sequence[Sequence[Partition]],
    unit_size: int,
    placement_of: Callable[[str], Placement | None] = lambda name: None,
    disk_unit_size: int = DISK_UNIT_SIZE,
) -> Workload:
    """Return the units of ``sub_groups``, each of at most ``unit_size`` parameters rounded up to ``PIECE_MULTIPLE``.

    Whole layers share a unit while they fit, and a longer layer is cut into equal pieces. If a sub-group ends inside a
    layer, each part is its own unit, unless it is a ``SLIVER`` or ``unit_size`` is ``WHOLE_SUB_GROUPS``.
    ``placement_of`` maps the name of a parameter to the placement of a rule or to None. A unit ends where this changes.
    Units on disk have at most ``disk_unit_size`` parameters, so that they stay the same when the others are cut anew.
    """
    units: list[Unit] = []
    persistent = tuple(chain.from_iterable(_ranges(*group, True) for group in enumerate(sub_groups)))
    if persistent:
        units.append(Unit(0, persistent, "persistent parameters", Placement.CPU, is_persistent=True))
    whole: Counter[str] = Counter()
    for partition in chain.from_iterable(sub_groups):
        whole[layer_of(partition.name)] += 0 if partition.is_persistent else partition.numel
    for sub_group, partitions in enumerate(sub_groups):
        ranges = _ranges(sub_group, partitions, False)
        total = sum(run.numel for run in ranges)
        begin = end = 0
        others = (partition for partition in partitions if not partition.is_persistent)
        for (on_disk, fixed), together in groupby(others, key=lambda each: (each.is_on_disk, placement_of(each.name))):
            most = disk_unit_size if on_disk else unit_size
            for run in _runs(together, most, {} if unit_size >= WHOLE_SUB_GROUPS else whole):
                for numel, label in _pieces(*run, most):
                    end += numel
                    border = min(-(-end // BORDER_MULTIPLE) * BORDER_MULTIPLE, total)
                    if border > begin:
                        place = Placement.CPU if on_disk else fixed
                        unit = Unit(len(units), tuple(_part(ranges, begin, border)), label, place, is_on_disk=on_disk)
                        units.append(unit)
                        begin = border
    return Workload(tuple(_joined(units, unit_size, disk_unit_size)))


def partitions_in(unit: Unit, sub_groups: Sequence[Sequence[Partition]]) -> Iterator[tuple[Partition, int]]:
    """Yield each partition in ``unit``, also in part, and how many of its elements precede the unit."""
    for run in unit.ranges:
        begin = 0
        for partition in sub_groups[run.sub_group]:
            if begin < run.end and begin + partition.numel > run.begin:
                yield partition, max(0, run.begin - begin)
            begin += partition.numel


def _ranges(sub_group: int, partitions: Sequence[Partition], is_persistent: bool) -> list[Range]:
    ranges: list[Range] = []
    begin = 0
    for found, together in groupby(partitions, key=lambda partition: partition.is_persistent):
        numel = sum(partition.numel for partition in together)
        if found is is_persistent and numel > 0:
            ranges.append(Range(sub_group, begin, numel))
        begin += numel
    return ranges


def _joined(units: Sequence[Unit], unit_size: int, disk_unit_size: int) -> list[Unit]:
    """Join the units of one layer that are whole sub-groups, because the host takes time for each unit."""
    units_of = Counter(unit.ranges[0].sub_group for unit in units if not unit.is_persistent)
    joined: list[Unit] = []
    before = None
    for unit in units:
        is_whole = not unit.is_persistent and units_of[unit.ranges[0].sub_group] == 1 and unit_size < WHOLE_SUB_GROUPS
        alike = (unit.label, unit.fixed, unit.is_on_disk) if is_whole else None
        most = disk_unit_size if unit.is_on_disk else unit_size
        if is_whole and alike == before and joined[-1].numel + unit.numel <= most:
            joined[-1] = replace(joined[-1], ranges=joined[-1].ranges + unit.ranges)
        else:
            joined.append(replace(unit, index=len(joined)))
        before = alike
    return joined


def _part(ranges: Sequence[Range], begin: int, end: int) -> Iterator[Range]:
    """Yield the elements [begin, end) of ``ranges``, counted without the gaps between them."""
    for run, after in zip(ranges, accumulate(run.numel for run in ranges), strict=True):
        before = after - run.numel
        first, last = max(begin, before), min(end, after)
        if first < last:
            yield Range(run.sub_group, run.begin + first - before, last - first)


def _runs(partitions: Iterable[Partition], unit_size: int, whole: Mapping[str, int]) -> list[tuple[int, str]]:
    """Return the lengths and labels of the longest runs of layers up to ``unit_size``. Parts of layers stay alone."""
    runs: list[tuple[int, str]] = []
    may_join = False
    for layer, of_layer in groupby(partitions, key=lambda partition: layer_of(partition.name)):
        numel = sum(partition.numel for partition in of_layer)
        is_part = SLIVER < numel / whole.get(layer, numel) < 1 - SLIVER
        if may_join and not is_part and runs[-1][0] + numel <= unit_size:
            before, label = runs.pop()
            runs.append((before + numel, f"{label.partition(' to ')[0]} to {layer}"))
        else:
            runs.append((numel, layer))
        may_join = not is_part
    return runs


def _pieces(numel: int, label: str, unit_size: int) -> Iterator[tuple[int, str]]:
    count = -(-numel // unit_size)
    each = -(-numel // (count * PIECE_MULTIPLE)) * PIECE_MULTIPLE
    numels = [min(each, numel - begin) for begin in range(0, numel, each)]
    for number, of_piece in enumerate(numels, start=1):
        yield of_piece, label if len(numels) == 1 else f"{label} ({number}/{len(numels)})"
