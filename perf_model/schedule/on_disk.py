"""Decide which optimizer states are on disk: as few as possible, and those that forward needs last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from perf_model.schedule.cutting import DISK_UNIT_SIZE
from perf_model.schedule.host_layout import NUM_DISK_SLOTS, PAGE_BYTES, Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Partition

EDGES_BYTES = 2 * PAGE_BYTES
"""The most bytes of one state of a partition that stay in host memory, because they share pages with others."""


def place_on_disk(
    sub_groups: Sequence[Sequence[Partition]],
    widths: Widths,
    host_bytes: int,
    placement_of: Callable[[str], Placement | None] = lambda name: None,
    disk_unit_size: int = DISK_UNIT_SIZE,
) -> list[list[Partition]]:
    """Return ``sub_groups`` with states on disk until the others, gradients and disk slots fit into ``host_bytes``.

    The last partitions are the first on disk. Persistent ones, and those that a rule places on the accelerator, are
    never on disk, and those of a few pages never gain anything there. If too few are left, all of these are on disk.
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
