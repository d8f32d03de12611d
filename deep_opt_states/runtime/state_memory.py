"""Reserve the memory of all states: a slab in host memory, and the memory on the accelerator that a plan needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamTensors, ElementRange
from deep_opt_states.device.slab import HostSlab
from deep_opt_states.runtime.state import Resident, Slot, UnitState
from perf_model.schedule.host_layout import Widths, slab_tensors
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import STATES, Unit, Workload


def widths_of(
    param: torch.Tensor,
    grad_dtype: torch.dtype,
    device: Device[Any],
    *,
    params_on_host: bool = False,
) -> Widths:
    """Return the bytes per element of each tensor, for a model whose parameters are like ``param``.

    The parameters are on ``device``, or in page-locked host memory if ``params_on_host``.
    """
    return Widths(
        param=param.element_size(),
        grad=grad_dtype.itemsize,
        publishes=not (params_on_host or device.shares_host_memory),
    )


@dataclass(frozen=True)
class SubGroupTensors:
    """The tensors of one sub-group in the slab, of shape [numel] each.

    The states are fp32. ``grad`` is in the accumulation dtype. ``rounded`` has the model's dtype; it is None if a CPU
    update needs no buffer for rounded parameters.
    """

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor
    rounded: torch.Tensor | None = None

    @property
    def adam_tensors(self) -> AdamTensors:
        """Return the tensors as an Adam kernel takes them, with ``rounded`` as the parameters."""
        return AdamTensors(
            master=self.master, exp_avg=self.exp_avg, exp_avg_sq=self.exp_avg_sq, grad=self.grad, param=self.rounded
        )


class StateMemory:
    """The states of one rank.

    ``sub_groups`` are the tensors in the slab, which do not depend on a plan. ``units`` are views of them, and the
    memory on the accelerator, for the plan that was passed to ``set_plan`` last. ``params`` has the flat buffer of each
    sub-group, of shape [numel], in the model's dtype; if ``params_on_host``, these buffers are in page-locked host
    memory although ``device`` has memory of its own.

    The constructor reserves the slab, which has zeros, and touches none of its pages. Raise ``HostMemoryError`` if the
    host cannot provide it.
    """

    def __init__(
        self,
        workload: Workload,
        params: Sequence[torch.Tensor],
        grad_dtype: torch.dtype,
        device: Device[Any],
        *,
        params_on_host: bool = False,
    ) -> None:
        widths = widths_of(params[0], grad_dtype, device, params_on_host=params_on_host)
        self._device = device
        self._params = list(params)
        self._publishes = widths.publishes
        self._params_on_host = params_on_host and not device.shares_host_memory
        self._slab: HostSlab = device.host_slab(widths.slab_bytes(workload))
        dtypes = {**dict.fromkeys(STATES, torch.float32), "grad": grad_dtype, "rounded": params[0].dtype}
        tensors: list[dict[str, torch.Tensor]] = [{} for _ in params]
        for tensor in slab_tensors(workload, widths):
            tensors[tensor.sub_group][tensor.name] = self._slab.tensor(
                tensor.offset_bytes, tensor.numel, dtypes[tensor.name]
            )
        self.sub_groups = [SubGroupTensors(**named) for named in tensors]
        self.units: list[UnitState] = []

    def set_plan(self, plan: UpdatePlan, *, is_evicted: bool = False) -> None:
        """Make ``units`` those of ``plan``, with the memory on the accelerator that their placements need.

        If ``is_evicted``, they get none there: it is training's, and the gradients go to host memory. Gradients are
        copied to their new place. The caller has written back resident states. Raise the device's out-of-memory error
        if memory is short; then nothing has changed.
        """
        staging = None if is_evicted else self._reserve_staging(plan)
        units = [
            self._unit(unit, placement, staging, is_evicted)
            for unit, placement in zip(plan.workload.units, plan.placements, strict=True)
        ]
        self._move_gradients(units)
        self.units = units

    def release_params(self) -> None:
        """Drop the references to the parameters: DeepSpeed frees its flat buffers in ``offload_states()``.

        No update begins before ``replace_params``.
        """
        self.replace_params([torch.empty_like(param, device="meta") for param in self._params])

    def replace_params(self, params: Sequence[torch.Tensor]) -> None:
        """Update ``params`` from now on: DeepSpeed reallocates its flat buffers in ``reload_states()``."""
        if all(param is known for param, known in zip(params, self._params, strict=True)):
            return
        self._params = list(params)
        for unit in self.units:
            unit.replace_param(unit.elements.view(self._params[unit.sub_group]))

    def lock(self) -> None:
        """Lock the slab's pages in memory. Call this once the threads that will use its pages have touched them.

        Raise ``HostMemoryError`` if the driver refuses.
        """
        self._slab.lock()

    def close(self) -> None:
        """Drop the states and close the slab. No operation that reads or writes the states may be in flight."""
        self.units = []
        self.sub_groups = []
        self._slab.close()

    def _elements(self, unit: Unit) -> ElementRange:
        numel = self._params[unit.sub_group].numel()
        return ElementRange(begin=unit.begin, end=unit.end, sub_group_numel=numel)

    def _unit(self, unit: Unit, placement: Placement, staging: torch.Tensor | None, is_evicted: bool) -> UnitState:
        """Return the state of ``unit``, with new memory on the accelerator if its placement needs it."""
        tensors, param = self.sub_groups[unit.sub_group], self._params[unit.sub_group]
        elements = self._elements(unit)
        master, narrowed_param = elements.view(tensors.master), elements.view(param)
        if not self._publishes:
            rounded = narrowed_param
        else:
            # The parameters of an fp32 model are published from the master weights.
            rounded = master if tensors.rounded is None else elements.view(tensors.rounded)
        state = UnitState(
            placement=placement,
            sub_group=unit.sub_group,
            elements=elements,
            master=master,
            exp_avg=elements.view(tensors.exp_avg),
            exp_avg_sq=elements.view(tensors.exp_avg_sq),
            grad=elements.view(tensors.grad),
            param=narrowed_param,
            rounded=rounded,
            is_evicted=is_evicted and placement is not Placement.CPU,
        )
        if not state.is_on_accelerator:
            return state
        state.grad = self._device.empty(unit.numel, tensors.grad.dtype)
        if staging is not None:
            state.staged = staging.narrow(0, 0, unit.numel)
        if placement is Placement.RESIDENT:
            state.resident = Resident(Slot.reserve(self._device, unit.numel))
        return state

    def _reserve_staging(self, plan: UpdatePlan) -> torch.Tensor | None:
        """Return memory on the accelerator for the parameters of its largest unit, if updates do not write in place."""
        numel = plan.largest_on_accelerator if self._params_on_host else 0
        if numel == 0:
            return None
        return self._device.empty(numel, self._params[0].dtype)

    def _move_gradients(self, units: Sequence[UnitState]) -> None:
        """Copy the gradients to where ``units`` have them, by way of the slab, and block the host until they are there.

        No gradient is being reduced. These are the gradients of the last step, which users may still read, or the sums
        of a window that is open while ``RunningPlan.evict`` gives memory back.
        """
        for state in self.units:
            if state.is_on_accelerator:
                self._device.copy(self._slab_grad(state), state.grad)
        for state in units:
            if state.is_on_accelerator:
                self._device.copy(state.grad, self._slab_grad(state))
        moved = self._device.event()
        self._device.current_stream().record(moved)
        moved.synchronize()

    def _slab_grad(self, state: UnitState) -> torch.Tensor:
        return state.elements.view(self.sub_groups[state.sub_group].grad)
