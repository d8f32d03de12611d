"""Express the updates of the measured programs as placements of sub-groups.

Twin-Flow (DeepSpeed's ``ratio``; ``stage3.py``, ``subgroup_to_device``) offloads the first sub-groups. The others stay
on the accelerator, which updates them after the first ones.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from perf_model.published.runs import RunSetting
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Workload
from perf_model.training_run.families.decoder import gpt

VOCAB = 51200
POSITIONS = 2048
MAX_LAYERS = 256
"""More than any model has, so that a mistake in a file does not make millions of sub-groups."""


@cache
def workload_of(setting: RunSetting) -> Workload:
    """Return the sub-groups of one rank.

    They are those of a GPT with the width of the run and as many layers as bring it near ``real_params``. Its tensors
    are scaled to match ``real_params``; their sizes only matter for the cuts between sub-groups. The number of layers
    in the logs matches the parameters less well.
    """
    one, two = (gpt("published", layers, setting.hidden, 1, VOCAB, POSITIONS).numel for layers in (1, 2))
    layers = min(MAX_LAYERS, max(1, 1 + round((setting.real_params - one) / (two - one))))
    shape = gpt("published", layers, setting.hidden, 1, VOCAB, POSITIONS)
    tensors = [numel for _, numel in shape.parameters()]
    scale = setting.real_params / sum(tensors)
    scaled = [max(1, round(scale * numel)) for numel in tensors]
    return Workload.from_parameters(scaled, setting.ranks, setting.sub_group_size)


@cache
def placements_of(setting: RunSetting) -> tuple[Placement, ...]:
    """Return the placement of each sub-group of one rank."""
    count = len(workload_of(setting).units)
    offloaded = int(setting.cpu_ratio * count)
    placements = [Placement.CPU] * offloaded + [Placement.RESIDENT] * (count - offloaded)
    if setting.update_stride is not None:
        for index in range(setting.update_stride - 1, offloaded, setting.update_stride):
            placements[index] = Placement.STREAMED
    return tuple(placements)


class UpdatedParameters(NamedTuple):
    """The parameters of one rank, by the way in which they are updated."""

    on_cpu: int
    streamed: int
    resident: int


@cache
def updated_parameters(setting: RunSetting) -> UpdatedParameters:
    """Return how many parameters of one rank are updated in which way."""
    counts = dict.fromkeys(Placement, 0)
    for unit, placement in zip(workload_of(setting).units, placements_of(setting), strict=True):
        counts[placement] += unit.numel
    return UpdatedParameters(counts[Placement.CPU], counts[Placement.STREAMED], counts[Placement.RESIDENT])
