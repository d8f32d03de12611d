"""Norms of the gradients: stock's sums in stock's order, and one look by the host at all that comes of them."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import mask_nan_or_inf_with_val_inplace


class Norms:
    """Of ``optimizer``'s gradients, whose parameters' norms are in its ``norm_for_param_grads``. Its methods are
    collectives over the data-parallel ranks, ``overflow`` also over the model-parallel ones, and each waits once for
    the accelerator."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._roots: torch.Tensor | None = None
        """Of the sub-groups, if they came with the answer whether there is an overflow."""

    @property
    def are_of_data_parallel_ranks(self) -> bool:
        """Whether nobody else has a part of them."""
        optimizer = self._optimizer
        return optimizer.model_parallel_group is None and not any(
            map(optimizer._autoep_expert_parallel_group, optimizer.fp16_groups)
        )

    def forget(self) -> None:
        """At the start of a step: what is known is of the last one."""
        self._roots = None

    def overflow(self) -> bool:
        """Whether a parameter's norm is not finite on any rank."""
        optimizer = self._optimizer
        norms = list(optimizer.norm_for_param_grads.values())
        device = get_accelerator().current_device_name()
        overflow = torch.zeros(1, dtype=torch.uint8, device=device)
        if norms:
            overflow += torch.stack([norm.to(device) for norm in norms]).isfinite().logical_not().any()
        group = optimizer.dp_process_group
        reductions = [dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=group, async_op=True)]
        if self.are_of_data_parallel_ranks:
            roots = self._reduced(reductions)
        else:
            roots = []
            _wait_for(reductions)
            # Each rank of a model-parallel group has a part of the model. A rank that alone skipped the step would
            # leave the others waiting for it in the reduction of the norm. Without such a group, this does nothing.
            optimizer._model_parallel_all_reduce(tensor=overflow, op=dist.ReduceOp.MAX)
        # The host waits once for both; the norms are asked for next.
        found = torch.cat([overflow.float(), *roots]).cpu()
        overflow_found = bool(found[0])
        # A step that is skipped does not ask, and who asks next means other gradients.
        self._roots = found[1:] if roots and not overflow_found else None
        return overflow_found

    def of_sub_groups(self) -> list[torch.Tensor]:
        """fp32 scalars on the host, -1 for what is not finite."""
        roots, self._roots = self._roots, None
        if roots is None:
            roots = torch.cat(self._reduced([])).cpu()
        # On the host: it makes a tensor on the device that it is given, for which the host would wait once more.
        mask_nan_or_inf_with_val_inplace(roots, device=roots.device)
        return list(roots.unbind())

    def _reduced(self, reductions: list[Any]) -> list[torch.Tensor]:
        """Shape [1] each, on the accelerator, when they and the ``reductions`` under way are done.

        Each sub-group's sum is all-reduced by itself: packed with others, it could be added up in another order.
        """
        optimizer = self._optimizer
        device = get_accelerator().current_device_name()
        sums = []
        for sub_group_id, group in enumerate(optimizer.fp16_groups):
            norms = (optimizer.norm_for_param_grads.get(optimizer.get_param_id(param)) for param in group)
            # In the norms' dtype, whatever the script that trains has made the default.
            total = torch.zeros((), dtype=torch.float32, device=device)
            for norm in norms:
                if norm is not None:
                    total = total + norm.to(device) ** 2
            sums.append(total.float().reshape(1))
            process_group = optimizer._get_sub_group_process_group(sub_group_id)
            reductions.append(dist.all_reduce(sums[-1], group=process_group, async_op=True))
        _wait_for(reductions)
        return [its ** (1.0 / 2.0) for its in sums]


def _wait_for(reductions: list[Any]) -> None:
    """Let what is issued next on the current stream follow the ``reductions``; one that is done may be None."""
    for reduction in reductions:
        if reduction is not None:
            reduction.wait()
