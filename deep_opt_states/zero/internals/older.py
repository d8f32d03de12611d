"""Do what older releases of DeepSpeed lack, or do under another name.

Each function is named after the first release that does not need it. Other differences need no function: the powers of
beta before 0.19 are found by trying (``device/kernels/arithmetic.py``); before 0.19.8, ``step()``, which is stock's,
goes on after a norm that is inf or NaN; and features that a release lacks are refused (``start/refusals.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist


def range_push_before_0_19_0(accelerator: Any, name: str) -> None:
    """Start an NVTX range; later releases have a domain of their own."""
    accelerator.range_push(name)


def range_pop_before_0_19_0(accelerator: Any) -> None:
    """End the NVTX range that was started last."""
    accelerator.range_pop()


def is_boundary_before_0_19_5(optimizer: Any) -> bool:
    """Return whether this backward ends an accumulation window. The engine sets an attribute before each backward."""
    return bool(optimizer.is_gradient_accumulation_boundary)


def norm_dtype_before_0_19_6() -> torch.dtype:
    """Return the dtype of the norms of gradients; later releases have another on accelerators without fp64."""
    return torch.float64


def partition_rank_before_0_19_3(optimizer: Any) -> int:
    """Return this rank's position among the ranks that share a parameter: all parameters have the same ranks."""
    return int(dist.get_rank(group=optimizer.dp_process_group))
