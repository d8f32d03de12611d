"""Let updates on the CPU take emulated time: the plugin's fused pass, and the three passes of stock DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from deep_opt_states.device.kernels.adam import RangeUpdate
from deep_opt_states.device.kernels.fused import FusedAdam
from perf_model.prediction.cost import CostModel, Resource
from perf_model.schedule.action import ActionKind
from perf_model.schedule.host_layout import SIXTEEN_BIT, Widths
from tests.software_gpu import device

PUBLISHES = "_reassign_or_swap_out_partitioned_parameters"
"""The method that also copies the parameters to the GPU."""


def stock_passes(widths: Widths) -> dict[str, int]:
    """Return the methods of stock's optimizer that do one pass each, with the bytes of host memory per parameter.

    They add up to the bytes of ``stock_traffic_by_action``. The plugin overrides the methods without calling them.
    """
    return {
        "unscale_and_clip_grads": 2 * widths.master,
        "_optimizer_step": 2 * widths.states + widths.master,
        PUBLISHES: widths.master + widths.param if widths.rounds else 0,
    }


class HostPasses:
    """The passes of CPU updates on an emulated machine.

    ``cost`` and ``stock`` are the cost models of the machine. Each of their seconds does the work of ``1 / per_s``
    emulated seconds. All of it takes time only while ``take_time`` is set.
    """

    def __init__(self, cost: CostModel, stock: CostModel, per_s: float, widths: Widths = SIXTEEN_BIT) -> None:
        self.take_time = False
        self._ours, self._stock = (model.per_param[ActionKind.CPU_STEP] for model in (cost, stock))
        self._stock_passes = stock_passes(widths)
        assert self._stock[Resource.DRAM] == sum(self._stock_passes.values())
        self._per_s = per_s

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Wrap the passes inside this context."""
        with ExitStack() as patches:
            patches.enter_context(mock.patch.object(FusedAdam, "update_ranges", self._fused(FusedAdam.update_ranges)))
            for name, num_bytes in self._stock_passes.items():
                method = getattr(DeepSpeedZeroOptimizer_Stage3, name)
                wrapped = self._stock_pass(method, num_bytes)
                patches.enter_context(mock.patch.object(DeepSpeedZeroOptimizer_Stage3, name, wrapped))
            yield

    @contextmanager
    def _working(self, numel: int, per_param: Any, share: float = 1.0) -> Iterator[None]:
        if not self.take_time:
            yield
            return
        cpu_s = per_param[Resource.CPU] * share * numel / self._per_s
        with device.host_work(cpu=cpu_s, host_memory=per_param[Resource.DRAM] * share * numel):
            yield

    def _fused(self, update_ranges: Callable[..., None]) -> Callable[..., None]:
        def wrapped(kernel: FusedAdam, updates: Sequence[RangeUpdate]) -> None:
            with self._working(sum(update.element_range.numel for update in updates), self._ours):
                update_ranges(kernel, updates)

        return wrapped

    def _stock_pass(self, method: Callable[..., Any], num_bytes: int) -> Callable[..., Any]:
        share = num_bytes / self._stock[Resource.DRAM]

        def wrapped(optimizer: Any, sub_group_id: int, *args: Any) -> None:
            numel = optimizer.fp16_partitioned_groups_flat[sub_group_id].numel()
            with self._working(numel, self._stock, share):
                if method.__name__ != PUBLISHES:
                    method(optimizer, sub_group_id, *args)
            if method.__name__ == PUBLISHES:
                # The device itself times the copy, which follows the pass.
                method(optimizer, sub_group_id, *args)

        return wrapped
