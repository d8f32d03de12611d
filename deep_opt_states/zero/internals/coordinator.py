"""What gathers a module's parameters before its forward: DeepSpeed's coordinator, and how far it looks ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils import z3_leaf_module

from deep_opt_states.zero.internals.compat import Parameter


class Coordinator:
    """DeepSpeed's ``PartitionedParameterCoordinator``, which gathers a module's parameters before its forward."""

    _BUCKET = "_PartitionedParameterCoordinator__prefetch_bucket_sz"

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator

    def around_fetch(self, around: Callable[..., Any]) -> Callable[[], object]:
        """``around(fetch, module, forward)`` stands for ``fetch_sub_module``; returns what undoes that."""
        fetch = self._coordinator.fetch_sub_module
        # DeepSpeed passes ``forward`` by name.
        self._coordinator.fetch_sub_module = lambda module, forward: around(fetch, module, forward)
        return lambda: delattr(self._coordinator, "fetch_sub_module")

    def gather_after_current_stream(self) -> None:
        """Let all-gathers that are issued from now on start after what the current stream has been given so far."""
        # None on an accelerator that executes at once.
        if (gathering := self._coordinator._PartitionedParameterCoordinator__allgather_stream) is not None:
            gathering.wait_stream(get_accelerator().current_stream())

    def first_uses(self) -> list[int] | None:
        """``ds_id`` of every parameter that is gathered, in the order of its first use; None before DeepSpeed knows.

        The same on every rank: DeepSpeed compares the ranks' traces.
        """
        if not self._coordinator.is_complete_trace():
            return None
        return list(
            dict.fromkeys(its.param.ds_id for its in self._coordinator._PartitionedParameterCoordinator__param_order)
        )

    @staticmethod
    def params_of(module: torch.nn.Module) -> list[Parameter]:
        """Those that a fetch of ``module`` makes available."""
        return list(iter_params(module, recurse=z3_leaf_module(module)))

    @staticmethod
    def is_partitioned(param: Parameter) -> bool:
        """It has to be gathered, and nobody has begun to."""
        return bool(param.ds_status == ZeroParamStatus.NOT_AVAILABLE)

    @contextmanager
    def prefetching_until(
        self, is_first_not_to: Callable[[Parameter], bool], fetched: list[Parameter]
    ) -> Iterator[None]:
        """A fetch of the parameters ``fetched`` inside gathers ahead as it would, but not from that parameter on.

        It takes parameters from the front of the trace until they have as many elements as the bucket.
        """
        bucket_numel = getattr(self._coordinator, self._BUCKET)
        seen = {param.ds_id for param in fetched}
        numel = 0
        for in_trace in self._coordinator._PartitionedParameterCoordinator__param_queue or ():
            param = in_trace.param
            if numel >= bucket_numel:
                break
            if param.ds_id in seen or not self.is_partitioned(param):
                continue
            if is_first_not_to(param):
                break
            seen.add(param.ds_id)
            numel += param.ds_numel
        setattr(self._coordinator, self._BUCKET, min(bucket_numel, numel))
        try:
            yield
        finally:
            setattr(self._coordinator, self._BUCKET, bucket_numel)
