"""The versions of DeepSpeed whose internals we know, and what is read of them beside the hooks that are overridden."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch

# Nothing of DeepSpeed is imported here: the doctor looks where that is broken.
SUPPORTED_DEEPSPEED = ("0.19.8",)

Parameter: TypeAlias = Any
"""A ``torch.nn.Parameter`` with ZeRO-3's attributes (``ds_id`` and others)."""


def is_supported(deepspeed_version: str) -> bool:
    """``deepspeed_version`` without a local build tag (``0.19.8+abc``) is one that this file was written for."""
    return deepspeed_version.split("+")[0] in SUPPORTED_DEEPSPEED


def param_dict(config: Any) -> dict[str, Any]:
    """The user's JSON, verbatim, of a ``DeepSpeedConfig``."""
    return config._param_dict


def forget_gradient_buffers(optimizer: Any) -> None:
    """Where stage 3 would sum the gradients over micro-batches. Nothing of stock's that we let run looks there."""
    # DeepSpeed asks where it is (``get_state_devices``).
    optimizer.grad_partitions_flat_buffer = torch.empty(0, dtype=optimizer.gradient_accumulation_dtype, device="cpu")
    optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition = {}


def sees_gradients(optimizer: Any, param: Any) -> bool:
    """Whether this rank's partition of ``param`` holds more than padding (the rule in ``partition_grads``)."""
    return param.partition_numel() * optimizer._get_param_partition_rank(param) < param.ds_numel


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
