"""Compute the norms of the gradients: stock's sums in stock's order, and one host synchronization for all results.

Stock's method computes the norm of each gradient in fp64 in backward; ``_foreach_norm`` would reduce in another order.
In ``step()`` stock adds up the squares on the host, one parameter after the other, and waits for each sub-group. Here
the accelerator adds in the same order, which ``sum`` and ``cumsum`` on a GPU would not.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import mask_nan_or_inf_with_val_inplace

from deep_opt_states.zero.internals.compat import (
    expert_parallel_group,
    model_parallel_all_reduce,
    norm_dtype,
    sub_group_process_group,
)


class Norms:
    """The norms of ``optimizer``'s gradients. In each method that returns some, the host waits at most once."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        groups = optimizer.fp16_groups
        self._param_ids = [optimizer.get_param_id(param) for group in groups for param in group]
        """DeepSpeed's ids of the parameters of all sub-groups, in stock's order."""
        self._device = get_accelerator().current_device_name()
        self._offsets = torch.tensor([0, *accumulate(map(len, groups))], device=self._device)
        """Where each sub-group starts in ``_param_ids``, and where the last one ends; on the accelerator."""
        self._zero = torch.zeros((), dtype=norm_dtype(), device=self._device)
        """The norm of a parameter without a gradient, which changes no bit of a sum."""
        self._roots: torch.Tensor | None = None
        """The norms of the sub-groups, on the host, if ``overflow`` has fetched them."""

    @property
    def are_data_parallel_only(self) -> bool:
        """Return whether the gradients are distributed over the data-parallel ranks only."""
        optimizer = self._optimizer
        return optimizer.model_parallel_group is None and not any(
            expert_parallel_group(optimizer, params) for params in optimizer.fp16_groups
        )

    def forget(self) -> None:
        """Discard norms that a script has asked for since the last step. Call this at the start of a step."""
        self._roots = None

    def overflow(self) -> bool:
        """Return whether the norm of any parameter is not finite on any rank. This is a collective over all ranks."""
        optimizer = self._optimizer
        norms = self._by_param()
        overflow = norms.isfinite().all().logical_not().to(torch.uint8).reshape(1)
        group = optimizer.dp_process_group
        reductions = [dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=group, async_op=True)]
        if self.are_data_parallel_only:
            results = [self._reduced(norms, reductions)]
        else:
            results = []
            _wait_for(reductions)
            # Every rank of a model-parallel group must skip: the others would wait for it in the reduction of the norm.
            model_parallel_all_reduce(optimizer, overflow, dist.ReduceOp.MAX)
        # The host waits once for both results: DeepSpeed reads the norms next.
        found = torch.cat([overflow.float(), *results]).cpu()
        overflow_found = bool(found[0])
        self._roots = found[1:] if results and not overflow_found else None
        return overflow_found

    def per_sub_group(self) -> list[torch.Tensor]:
        """Return the norm of each sub-group as an fp32 scalar on the host, -1 if it is not finite. A collective."""
        roots, self._roots = self._roots, None
        if roots is None:
            roots = self._reduced(self._by_param(), []).cpu()
        # Mask on the host: this function creates a tensor on the given device, for which the host would wait again.
        mask_nan_or_inf_with_val_inplace(roots, device=roots.device)
        return list(roots.unbind())

    def _by_param(self) -> torch.Tensor:
        """Return the norm of each parameter, of shape [parameters] in the dtype of the norms, on the accelerator."""
        norms = self._optimizer.norm_for_param_grads
        # If a user has set the gradient, its norm is where that tensor was.
        return torch.stack([norms.get(param_id, self._zero).to(self._device) for param_id in self._param_ids])

    def _reduced(self, norms: torch.Tensor, reductions: list[Any]) -> torch.Tensor:
        """Return the fp32 norms of the sub-groups from the ``norms`` of the parameters, and wait for ``reductions``."""
        # The sum of each sub-group is all-reduced separately: packed with others, it could be added in another order.
        totals = sums_in_order(norms**2, self._offsets).float()
        for sub_group_id, total in enumerate(totals.split(1)):
            process_group = sub_group_process_group(self._optimizer, sub_group_id)
            reductions.append(dist.all_reduce(total, group=process_group, async_op=True))
        _wait_for(reductions)
        return totals ** (1.0 / 2.0)


def sums_in_order(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the sum of each segment of ``values``, added to 0 one value after the other, in the dtype of ``values``.

    ``values`` has shape [numel], and ``offsets`` shape [segments + 1], int64. The host does not wait. With one
    dimension, PyTorch would reduce in parallel on CUDA. With two, one thread adds up one segment, as on the CPU
    (``segment_reduce_forward_kernel`` in ``aten/src/ATen/native/cuda/SegmentReduce.cu``).
    """
    # Without ``unsafe``, the host would read the offsets to check them.
    return torch.segment_reduce(values.unsqueeze(1), "sum", offsets=offsets, unsafe=True).squeeze(1)


def _wait_for(reductions: list[Any]) -> None:
    """Make the current stream wait for the ``reductions``. A reduction that has finished may be None."""
    for reduction in reductions:
        if reduction is not None:
            reduction.wait()
