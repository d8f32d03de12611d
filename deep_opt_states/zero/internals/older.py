"""Replace functions that older releases of DeepSpeed lack; each name contains the first release that has it.

Other differences need no function: ``device/kernels/arithmetic.py`` finds the powers of beta before 0.19 by trying,
``step()`` before 0.19.8 continues after a norm that is inf or NaN, and ``start/refusals.py`` refuses missing features.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist


def range_push_before_0_19_0(accelerator: Any, name: str) -> None:
    """Start an NVTX range, without the domain of later releases."""
    accelerator.range_push(name)


def range_pop_before_0_19_0(accelerator: Any) -> None:
    """End the NVTX range that was started last."""
    accelerator.range_pop()


def is_boundary_before_0_19_5(optimizer: Any) -> bool:
    """Return whether this backward ends an accumulation window."""
    return bool(optimizer.is_gradient_accumulation_boundary)


def norm_dtype_before_0_19_6() -> torch.dtype:
    """Return the dtype of the norms of gradients, also on accelerators without fp64."""
    return torch.float64


def partition_rank_before_0_19_3(optimizer: Any) -> int:
    """Return this rank's index among the ranks that share any parameter."""
    return int(dist.get_rank(group=optimizer.dp_process_group))
