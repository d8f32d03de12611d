"""The parameters that DeepSpeed keeps gathered, and gathers anew at the end of ``step()``: none can be updated late."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any


def ranges_by_sub_group(optimizer: Any) -> list[list[tuple[int, int]]]:
    """Where they lie in this rank's partition of each sub-group, as [begin, end)."""
    kept = _kept(optimizer)
    ranges = []
    for group in optimizer.fp16_groups:
        borders = [0, *accumulate(param.partition_numel() for param in group)]
        of_params = zip(pairwise(borders), group, strict=True)
        ranges.append([its for its, param in of_params if param.ds_id in kept])
    return ranges


def sub_groups_of_others(optimizer: Any) -> dict[int, int]:
    """By ``ds_id`` of every parameter that is not one of them."""
    kept = _kept(optimizer)
    return {
        param.ds_id: sub_group_id
        for sub_group_id, group in enumerate(optimizer.fp16_groups)
        for param in group
        if param.ds_id not in kept
    }


def _kept(optimizer: Any) -> set[int]:
    return {param.ds_id for param in optimizer.persistent_parameters}
