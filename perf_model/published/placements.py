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

VOCAB = 51200
"""The vocabulary of GPT-2, padded as Megatron-LM does."""

KV_HEADS = 4
"""The heads of keys and values; with fewer heads of queries, there are as many. The parameters and layers that the logs
print match these and feed-forward widths of 11008, 12400, 13824, 20480 and 17920 within 0.7 %."""

HEAD_DIM = 128
"""The width of a head if a file does not have the heads of a run."""

MAX_LAYERS = 256
"""More than any model has, so that a mistake in a file does not make millions of sub-groups."""


@cache
def workload_of(setting: RunSetting) -> Workload:
    """Return the sub-groups of one rank.

    The launch script of the artifact trains Llama-like models with Megatron-DeepSpeed: rotary positions, no biases,
    untied embeddings, and a gated feed-forward whose first matrices are one parameter, as those of queries, keys and
    values are. ZeRO-3 leaves parameters without a shape when Megatron looks for vectors, which have no weight decay, so
    all parameters are in one param group.
    """
    tensors = _tensors(setting)
    scale = setting.real_params / sum(tensors)
    scaled = [max(1, round(scale * numel)) for numel in tensors]
    return Workload.from_parameters(scaled, setting.ranks, setting.sub_group_size)


def _tensors(setting: RunSetting) -> list[int]:
    """Return the numbers of elements of all parameters, in Megatron's order.

    The feed-forward is as wide as ``real_params`` require, or 8/3 of ``hidden`` if the number of layers is not known.
    """
    hidden, table = setting.hidden, VOCAB * setting.hidden
    heads = setting.heads or max(1, hidden // HEAD_DIM)
    projections = round(hidden * hidden * (1 + 2 * min(KV_HEADS, heads) / heads))
    attention = projections + hidden * hidden
    left = max(0, setting.real_params - 2 * table)
    layers = setting.layers or round(left / (attention + 8 * hidden * hidden))
    layers = min(MAX_LAYERS, max(1, layers))
    width = max(1, round((left / layers - attention) / (3 * hidden)))
    layer = [hidden, projections, hidden * hidden, hidden, 2 * hidden * width, hidden * width]
    return [table, *(layers * layer), hidden, table]


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
