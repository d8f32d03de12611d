"""Replace the names that older releases of DeepSpeed lack; each name contains the first release that has it.

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


def masters_dtype_before_0_18_3() -> torch.dtype:
    """Return the dtype of the master weights, and of the gradients that update them."""
    return torch.float32


class BackwardBefore_0_18_3:
    """A part of stock's optimizer whose method ``backward`` calls the hook ``backward_prologue`` of later releases."""

    def backward_prologue(self) -> None:
        """Do nothing: the work of later releases here is a part of this ``backward``."""

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients as stock does, after the hook."""
        self.backward_prologue()
        super().backward(*args, **kwargs)  # type: ignore[misc]


class ForwardBefore_0_18_5:
    """A part of stock's optimizer that calls the hook ``clear_backward_seen_flag`` of later releases."""

    module: torch.nn.Module
    _grad_acc_hooks: list[Any]

    def clear_backward_seen_flag(self) -> None:
        """Do nothing: there is no such flag."""

    def create_reduce_and_remove_grad_hooks(self) -> None:
        """Create stock's hooks, and one that is called before each forward, where later engines call the method."""
        super().create_reduce_and_remove_grad_hooks()  # type: ignore[misc]
        before_forward = self.module.register_forward_pre_hook(lambda *args: self.clear_backward_seen_flag())
        self._grad_acc_hooks.append(before_forward)


def with_later_hooks(stock: Any) -> Any:
    """Return stock's class, with the hooks of backward and forward that this release lacks."""
    parts = {"backward_prologue": BackwardBefore_0_18_3, "clear_backward_seen_flag": ForwardBefore_0_18_5}
    missing = [part for name, part in parts.items() if not hasattr(stock, name)]
    return type(stock.__name__, (*missing, stock), {}) if missing else stock
