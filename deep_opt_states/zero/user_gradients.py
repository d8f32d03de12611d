"""Override the hooks of DeepSpeed's optimizer by which users read and set gradients after backward."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from deep_opt_states.zero.internals.compat import all_gather_partitions, partition_rank
from deep_opt_states.zero.step.gradients import Gradients


class UserGradients(DeepSpeedZeroOptimizer_Stage3):
    """The mixin by which users read and set the gradients in ``_gradients``."""

    _gradients: Gradients

    def set_fp32_grad_for_param(self, value: Any, param: Any) -> None:
        super().set_fp32_grad_for_param(value, param)
        self._gradients.mark_set_by_user([param])

    def set_local_grad_for_param(self, value: Any, param: Any) -> None:
        super().set_local_grad_for_param(value, param)
        self._gradients.mark_set_by_user([param])

    def update_fp32_grad_for_param_vectorized(self, update_func: Any, param_list: Any) -> None:
        """Replace the gradients of ``param_list`` by ``update_func(gradient, param)``.

        This is a collective over the ranks that share these parameters.
        ``gradient`` and the returned tensor are fp32 and have the parameter's shape.
        """
        params = [param for param in param_list if param.requires_grad]
        # The order of the collectives is stock's: sub-groups in the order in which they appear first.
        by_sub_group: dict[int, list[Any]] = {}
        for param in params:
            by_sub_group.setdefault(self.grad_position[self.get_param_id(param)][0], []).append(param)
        for param in (param for group in by_sub_group.values() for param in group):
            partition, _ = self._get_fp32_grad_state_partition(param, release_swap_buffers=False)
            whole = update_func(all_gather_partitions(self, param, partition), param).flatten()
            own_part = whole.narrow(0, partition.numel() * partition_rank(self, param), partition.numel())
            partition.copy_(own_part)
        self._gradients.mark_set_by_user(params)

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, torch.Tensor]]:
        self._wait_for_reduction()
        return {
            sub_group_id: {index: self._gradients.writable_fp32(param) for index, param in enumerate(group)}
            for sub_group_id, group in enumerate(self.fp16_groups)
        }

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> tuple[torch.Tensor, int]:
        self._wait_for_reduction()
        # A caller that lets stock release the swap buffers at once only reads; the others are about to write.
        partition = self._gradients.read(param) if release_swap_buffers else self._gradients.writable_fp32(param)
        return partition, self.grad_position[self.get_param_id(param)][0]

    def _wait_for_reduction(self) -> None:
        if not get_accelerator().resolves_data_dependency():
            self.reduce_and_partition_stream.synchronize()
            self._gradients.synchronize()
