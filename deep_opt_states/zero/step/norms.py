"""Compute the norms of the gradients: stock's sums in stock's order, and one host synchronization for all results."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import mask_nan_or_inf_with_val_inplace

from deep_opt_states.zero.internals.compat import (
    expert_parallel_group,
    model_parallel_all_reduce,
    sub_group_process_group,
)


class Norms:
    """The norms of ``optimizer``'s gradients, computed from the norms per parameter in its ``norm_for_param_grads``.

    ``overflow`` and ``per_sub_group`` are collectives over the data-parallel ranks, ``overflow`` also over the
    model-parallel ranks. Each of them makes the host wait for the accelerator at most once.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._roots: torch.Tensor | None = None
        """The norms of the sub-groups, on the host, if ``overflow`` has fetched them together with its own result."""

    @property
    def are_data_parallel_only(self) -> bool:
        """Return whether the gradients are distributed over the data-parallel ranks only."""
        optimizer = self._optimizer
        return optimizer.model_parallel_group is None and not any(
            expert_parallel_group(optimizer, params) for params in optimizer.fp16_groups
        )

    def forget(self) -> None:
        """Discard norms of the previous step. Call this at the start of a step."""
        self._roots = None

    def overflow(self) -> bool:
        """Return whether the norm of any parameter is not finite on any rank. Collective."""
        optimizer = self._optimizer
        norms = list(optimizer.norm_for_param_grads.values())
        device = get_accelerator().current_device_name()
        overflow = torch.zeros(1, dtype=torch.uint8, device=device)
        if norms:
            overflow += torch.stack([norm.to(device) for norm in norms]).isfinite().logical_not().any()
        group = optimizer.dp_process_group
        reductions = [dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=group, async_op=True)]
        if self.are_data_parallel_only:
            roots = self._reduced(reductions)
        else:
            roots = []
            _wait_for(reductions)
            # Each rank of a model-parallel group has a part of the model. If only one rank skipped the step, the others
            # would wait for it forever in the reduction of the norm. Without such a group, this does nothing.
            model_parallel_all_reduce(optimizer, overflow, dist.ReduceOp.MAX)
        # The host waits once for both results: DeepSpeed reads the norms next.
        found = torch.cat([overflow.float(), *roots]).cpu()
        overflow_found = bool(found[0])
        # A skipped step does not read the norms, and the next step has other gradients.
        self._roots = found[1:] if roots and not overflow_found else None
        return overflow_found

    def per_sub_group(self) -> list[torch.Tensor]:
        """Return the norm of each sub-group as an fp32 scalar on the host, -1 if it is not finite. Collective."""
        roots, self._roots = self._roots, None
        if roots is None:
            roots = torch.cat(self._reduced([])).cpu()
        # Mask on the host: this function creates a tensor on the given device, for which the host would wait again.
        mask_nan_or_inf_with_val_inplace(roots, device=roots.device)
        return list(roots.unbind())

    def _reduced(self, reductions: list[Any]) -> list[torch.Tensor]:
        """Return the norm of each sub-group, shape [1], on the accelerator, when the ``reductions`` have finished, too.

        Each sub-group's sum is all-reduced separately: packed with others, it could be added up in another order.
        """
        optimizer = self._optimizer
        device = get_accelerator().current_device_name()
        totals = []
        for sub_group_id, group in enumerate(optimizer.fp16_groups):
            norms = (optimizer.norm_for_param_grads.get(optimizer.get_param_id(param)) for param in group)
            # Name the dtype of the norms: the training script may have changed the default.
            total = torch.zeros((), dtype=torch.float32, device=device)
            for norm in norms:
                if norm is not None:
                    total = total + norm.to(device) ** 2
            totals.append(total.float().reshape(1))
            process_group = sub_group_process_group(optimizer, sub_group_id)
            reductions.append(dist.all_reduce(totals[-1], group=process_group, async_op=True))
        _wait_for(reductions)
        return [total ** (1.0 / 2.0) for total in totals]


def _wait_for(reductions: list[Any]) -> None:
    """Make the current stream wait for the ``reductions``. A reduction that has finished may be None."""
    for reduction in reductions:
        if reduction is not None:
            reduction.wait()
