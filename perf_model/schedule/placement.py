"""Define where a sub-group is updated, and the rules that place sub-groups without a measurement."""

from __future__ import annotations

from enum import Enum

from perf_model.schedule.workload import Workload


class Placement(Enum):
    """The place where the states of a sub-group are kept and updated."""

    CPU = "cpu"
    """The states stay in host memory, and Adam runs on the host."""
    STREAMED = "streamed"
    """The states are copied from host memory to a slot on the accelerator and back in each step."""
    RESIDENT = "resident"
    """The states stay in accelerator memory and are updated there."""


def place_all(workload: Workload, placement: Placement) -> tuple[Placement, ...]:
    """Return ``placement`` for every sub-group."""
    return tuple(placement for _ in workload.sub_groups)


def place_by_stride(workload: Workload, stride: int) -> tuple[Placement, ...]:
    """Stream every ``stride``-th sub-group: index i with (i + 1) % stride == 0 (arXiv 2410.21316)."""
    return tuple(
        Placement.STREAMED if (sub_group.index + 1) % stride == 0 else Placement.CPU
        for sub_group in workload.sub_groups
    )


def place_by_fraction(workload: Workload, gpu_fraction: float) -> tuple[Placement, ...]:
    """Stream about ``gpu_fraction`` of the *parameters*, spread evenly over the sub-groups.

    The rule is error diffusion: a sub-group is streamed if that brings the parameters streamed so far nearer to their
    share of the parameters seen so far. At every prefix, and so overall, the streamed parameters differ from their
    share by at most half of the largest sub-group.
    """
    placements = []
    owed = 0.0
    for sub_group in workload.sub_groups:
        owed += gpu_fraction * sub_group.numel
        streamed = owed > sub_group.numel / 2
        owed -= sub_group.numel if streamed else 0
        placements.append(Placement.STREAMED if streamed else Placement.CPU)
    return tuple(placements)
