"""Reserve the memory of all sub-groups' states, each where its placement requires it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.device.slab import HostSlab
from deep_opt_states.runtime.state import SubGroupState
from perf_model.schedule.host_layout import Widths, slab_tensors
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import STATES


def widths_of(
    param: torch.Tensor, grad_dtype: torch.dtype, device: Device[Any], *, params_on_host: bool = False
) -> Widths:
    """Return the bytes per element of each tensor, for a model whose parameters are like ``param``.

    The parameters are on ``device``, or in page-locked host memory if ``params_on_host``.
    """
    return Widths(
        param=param.element_size(),
        grad=grad_dtype.itemsize,
        publishes=not (params_on_host or device.shares_host_memory),
    )


class StateMemory:
    """The states of all sub-groups, and the slab that holds those in host memory.

    The slab is laid out sub-group by sub-group. It is registered with the driver once its pages are touched.
    """

    def __init__(self, slab: HostSlab, states: list[SubGroupState]) -> None:
        self._slab = slab
        self.states = states

    @classmethod
    def reserve(
        cls,
        plan: UpdatePlan,
        params: Sequence[torch.Tensor],
        grad_dtype: torch.dtype,
        device: Device[Any],
        *,
        params_on_host: bool = False,
    ) -> StateMemory:
        """Reserve the states of all sub-groups, filled with zeros.

        ``params`` has the flat buffer of each sub-group, of shape [numel], in the model's dtype. If ``params_on_host``,
        these buffers are in page-locked host memory although ``device`` has memory of its own. Raise
        ``HostMemoryError`` if the host cannot provide the slab, or the device's out-of-memory error.
        """
        widths = widths_of(params[0], grad_dtype, device, params_on_host=params_on_host)
        slab = device.host_slab(widths.slab_bytes(plan))
        dtypes = {**dict.fromkeys(STATES, torch.float32), "grad": grad_dtype, "rounded": params[0].dtype}
        on_host: list[dict[str, torch.Tensor]] = [{} for _ in plan.placements]
        for tensor in slab_tensors(plan, widths):
            on_host[tensor.sub_group][tensor.name] = slab.tensor(tensor.offset_bytes, tensor.numel, dtypes[tensor.name])
        staged_numel = plan.largest_on_accelerator if params_on_host and not device.shares_host_memory else 0
        staging = device.empty(staged_numel, params[0].dtype) if staged_numel else None
        states = []
        for tensors, param, placement in zip(on_host, params, plan.placements, strict=True):
            for name in (*STATES, "grad"):
                if name not in tensors:
                    tensors[name] = device.empty(param.numel(), dtypes[name]).zero_()
            rounded = None
            if placement is Placement.CPU:
                published = tensors["master"] if widths.publishes and param.dtype == torch.float32 else param
                rounded = tensors.pop("rounded", published)
            staged = None
            if staging is not None and placement is not Placement.CPU:
                staged = staging.narrow(0, 0, param.numel())
            states.append(SubGroupState(**tensors, param=param, rounded=rounded, staged=staged))
        return cls(slab, states)

    def lock(self) -> None:
        """Lock the slab's pages in memory. Call this once the threads that will use its pages have touched them.

        Raise ``HostMemoryError`` if the driver refuses.
        """
        self._slab.lock()

    def close(self) -> None:
        """Drop the states and close the slab. No operation that reads or writes the states may be in flight."""
        self.states = []
        self._slab.close()
