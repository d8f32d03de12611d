"""The memory of all sub-groups' states, each where its placement has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.device.slab import HostSlab
from deep_opt_states.runtime.state import SubGroupState
from perf_model.schedule.host_layout import STATES, Widths, parts_of
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan


def widths_of(
    param: torch.Tensor, grad_dtype: torch.dtype, device: Device[Any], *, params_on_host: bool = False
) -> Widths:
    """Return the widths of a model with such parameters, which are on ``device`` or in host memory."""
    return Widths(
        param=param.element_size(),
        grad=grad_dtype.itemsize,
        publishes=not (params_on_host or device.shares_host_memory),
    )


class StateMemory:
    """Host memory is one slab, laid out sub-group by sub-group, registered once it is touched."""

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
        """Reserve all states, which are zero. ``params`` are the flat buffers of the sub-groups, in the model's dtype;
        ``params_on_host``: in page-locked host memory, though ``device`` has memory of its own."""
        widths = widths_of(params[0], grad_dtype, device, params_on_host=params_on_host)
        slab = device.host_slab(widths.slab_bytes(plan))
        dtypes = {**dict.fromkeys(STATES, torch.float32), "grad": grad_dtype, "rounded": params[0].dtype}
        on_host: list[dict[str, torch.Tensor]] = [{} for _ in plan.placements]
        for part in parts_of(plan, widths):
            on_host[part.sub_group][part.name] = slab.tensor(part.offset_bytes, part.numel, dtypes[part.name])
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
        """To be called once the host's part is touched by the threads that will use it."""
        self._slab.lock()

    def close(self) -> None:
        """Nothing that reads or writes the states may be under way."""
        self.states = []
        self._slab.close()
