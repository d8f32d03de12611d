"""The memory of all sub-groups' states, each where its placement has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.device.slab import HostSlab
from deep_opt_states.runtime.state import SubGroupState
from perf_model.placement import Placement
from perf_model.plan import UpdatePlan
from perf_model.slab import STATES, Widths, parts_of


def widths_of(param: torch.Tensor, grad_dtype: torch.dtype, device: Device[Any]) -> Widths:
    """Of a model with such parameters on ``device``."""
    return Widths(param=param.element_size(), grad=grad_dtype.itemsize, publishes=not device.shares_host_memory)


class StateMemory:
    """Host memory is one slab, laid out sub-group by sub-group, registered once it is touched."""

    def __init__(self, slab: HostSlab, states: list[SubGroupState]) -> None:
        self._slab = slab
        self.states = states

    @classmethod
    def reserve(
        cls, plan: UpdatePlan, params: Sequence[torch.Tensor], grad_dtype: torch.dtype, device: Device[Any]
    ) -> StateMemory:
        """``params`` are the flat buffers of the sub-groups, in the model's dtype. All states are zero."""
        widths = widths_of(params[0], grad_dtype, device)
        slab = device.host_slab(widths.slab_bytes(plan))
        dtypes = {**dict.fromkeys(STATES, torch.float32), "grad": grad_dtype, "rounded": params[0].dtype}
        on_host: list[dict[str, torch.Tensor]] = [{} for _ in plan.placements]
        for part in parts_of(plan, widths):
            on_host[part.sub_group][part.name] = slab.tensor(part.offset_bytes, part.numel, dtypes[part.name])
        states = []
        for tensors, param, placement in zip(on_host, params, plan.placements, strict=True):
            for name in (*STATES, "grad"):
                if name not in tensors:
                    tensors[name] = device.empty(param.numel(), dtypes[name]).zero_()
            rounded = None
            if placement is Placement.CPU:
                written = tensors["master"] if param.dtype == torch.float32 else param
                rounded = tensors.pop("rounded", written)
            states.append(SubGroupState(**tensors, param=param, rounded=rounded))
        return cls(slab, states)

    def lock(self) -> None:
        """To be called once the host's part is touched by the threads that will use it."""
        self._slab.lock()

    def close(self) -> None:
        """Nothing that reads or writes the states may be under way."""
        self.states = []
        self._slab.close()
