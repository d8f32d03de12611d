"""Control how far DeepSpeed gathers parameters ahead of the module that needs them."""

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
    """The ``PartitionedParameterCoordinator`` of DeepSpeed's ``optimizer``, with the names that the plugin uses."""

    _BUCKET = "_PartitionedParameterCoordinator__prefetch_bucket_sz"

    def __init__(self, optimizer: Any) -> None:
        self._coordinator = optimizer._get_param_coordinator()
        self._modules_in_forward = 0
        """The number of modules of the trace that forward has fetched; backward fetches the others."""

    def wrap_fetch(self, wrapper: Callable[..., Any]) -> Callable[[], object]:
        """Replace ``fetch_sub_module`` by ``wrapper(fetch, module, forward)`` until the result is called."""
        fetch = self._coordinator.fetch_sub_module
        self._coordinator.fetch_sub_module = lambda module, forward: wrapper(fetch, module, forward)
        return lambda: delattr(self._coordinator, "fetch_sub_module")

    def gather_after_current_stream(self) -> None:
        """Make all-gathers that are issued later wait for the present work of the current stream."""
        if (gathering := self._coordinator._PartitionedParameterCoordinator__allgather_stream) is not None:
            gathering.wait_stream(get_accelerator().current_stream())

    def mark_end_of_forward(self) -> None:
        """Record where forward ends in the trace, while DeepSpeed records one."""
        if self._coordinator.is_record_trace():
            self._modules_in_forward = len(self._coordinator._PartitionedParameterCoordinator__submodule_order)

    def uses(self) -> list[int] | None:
        """Return a ``ds_id`` per use of a parameter by forward, in order, and then the rest; None without a trace."""
        # DeepSpeed compares the traces, so the result is the same on every rank.
        if not self._coordinator.is_complete_trace():
            return None
        order = self._coordinator._PartitionedParameterCoordinator__submodule_order
        modules = order[: self._modules_in_forward]
        # As in DeepSpeed's ``record_parameters``.
        uses = [ds_id for module in modules for ds_id in sorted({param.ds_id for param in self.params_of(module)})]
        # Parameters that the forward of the whole model does not use, if a script calls parts of it.
        trace = self._coordinator._PartitionedParameterCoordinator__param_order
        known = set(uses)
        others = dict.fromkeys(entry.param.ds_id for entry in trace if entry.param.ds_id not in known)
        return [*uses, *others]

    @staticmethod
    def params_of(module: torch.nn.Module) -> list[Parameter]:
        """Return the parameters that a fetch of ``module`` gathers."""
        return list(iter_params(module, recurse=z3_leaf_module(module)))

    @staticmethod
    def is_partitioned(param: Parameter) -> bool:
        """Return whether the parameter is neither gathered nor being gathered."""
        return bool(param.ds_status == ZeroParamStatus.NOT_AVAILABLE)

    @contextmanager
    def prefetching_until(self, is_excluded: Callable[[Parameter], bool], fetched: list[Parameter]) -> Iterator[None]:
        """Limit how far a fetch of ``fetched`` gathers ahead: up to the first parameter that ``is_excluded``."""
        bucket_numel = getattr(self._coordinator, self._BUCKET)
        seen = {param.ds_id for param in fetched}
        numel = 0
        for param in (entry.param for entry in self._coordinator._PartitionedParameterCoordinator__param_queue or ()):
            if param.ds_id in seen or not self.is_partitioned(param):
                continue
            if numel >= bucket_numel or is_excluded(param):
                break
            seen.add(param.ds_id)
            numel += param.ds_numel
        try:
            setattr(self._coordinator, self._BUCKET, min(bucket_numel, numel))
            yield
        finally:
            setattr(self._coordinator, self._BUCKET, bucket_numel)
