"""Where a sub-group is updated, and the rules that place sub-groups without a measurement."""

from __future__ import annotations

from enum import Enum

from perf_model.schedule.workload import Workload


class Placement(Enum):
    CPU = "cpu"
    """State stays in host memory; Adam runs on the host."""
    STREAMED = "streamed"
    """State goes from host memory to a slot on the accelerator and back, each step."""
    RESIDENT = "resident"
    """State stays in accelerator memory, and is updated there."""


def place_all(workload: Workload, placement: Placement) -> tuple[Placement, ...]:
    return tuple(placement for _ in workload.sub_groups)


def place_by_stride(workload: Workload, stride: int) -> tuple[Placement, ...]:
    """Every ``stride``-th sub-group streamed: index i with (i + 1) % stride == 0 (arXiv 2410.21316)."""
    return tuple(
        Placement.STREAMED if (sub_group.index + 1) % stride == 0 else Placement.CPU
        for sub_group in workload.sub_groups
    )


def place_by_fraction(workload: Workload, gpu_fraction: float) -> tuple[Placement, ...]:
    """Stream about ``gpu_fraction`` of the *parameters*, spread evenly over the sub-groups.

    Error diffusion: a sub-group is streamed when that brings the parameters streamed so far nearer to their
    share of the parameters seen so far. At every prefix, and so in all, the streamed parameters are within
    half of the largest sub-group of their share.
    """
    placements = []
    owed = 0.0
    for sub_group in workload.sub_groups:
        owed += gpu_fraction * sub_group.numel
        streamed = owed > sub_group.numel / 2
        owed -= sub_group.numel if streamed else 0
        placements.append(Placement.STREAMED if streamed else Placement.CPU)
    return tuple(placements)
