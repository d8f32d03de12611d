"""Reserve the memory of all states: a slab in host memory, and the memory on the accelerator that a plan needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import FP32_STATES, AdamTensors, ElementRange, StateDtypes, UpdatedStates
from deep_opt_states.device.slab import HostSlab
from deep_opt_states.runtime.disk_states import DiskStates
from deep_opt_states.runtime.state import Packing, Resident, Shadow, Slot, UnitPart, UnitState
from perf_model.schedule.host_layout import Widths, aligned, slab_tensors
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Range, Unit, Workload


def widths_of(
    param: torch.Tensor,
    grad_dtype: torch.dtype,
    device: Device[Any],
    dtypes: StateDtypes = FP32_STATES,
    *,
    params_on_host: bool = False,
) -> Widths:
    """Return the bytes per element of each tensor, if the model's parameters are like ``param``."""
    return Widths(
        param=param.element_size(),
        grad=grad_dtype.itemsize,
        master=dtypes.master.itemsize,
        moment=dtypes.moment.itemsize,
        publishes=not (params_on_host or device.shares_host_memory),
    )


class StateMemory:
    """The states of one rank: ``sub_groups``, the tensors in the slab, and ``units``, which depend on the plan.

    ``params`` holds the flat buffer of each sub-group, of shape [numel], in the model's dtype, in pinned memory if
    ``params_on_host`` although ``device`` has its own. ``disk_folders`` hold the states of units on disk. The
    constructor touches no page of the slab, which is zero. Raise ``HostMemoryError`` or ``DiskError`` without room.
    """

    def __init__(
        self,
        workload: Workload,
        params: Sequence[torch.Tensor],
        grad_dtype: torch.dtype,
        device: Device[Any],
        dtypes: StateDtypes = FP32_STATES,
        *,
        params_on_host: bool = False,
        disk_folders: Sequence[Path] = (),
    ) -> None:
        widths = widths_of(params[0], grad_dtype, device, dtypes, params_on_host=params_on_host)
        self.dtypes, self._grad_dtype = dtypes, grad_dtype
        self._device = device
        self._params = list(params)
        self._publishes = widths.publishes
        self._params_on_host = params_on_host and not device.shares_host_memory
        self._slab: HostSlab = device.host_slab(widths.slab_bytes(workload))
        self._slab_tensors = list(slab_tensors(workload, widths))
        self.disk: DiskStates | None = None
        if workload.on_disk_numel:
            # First: tensors over pages that were replaced later would be the same.
            self.disk = DiskStates(workload, widths, dtypes.by_name, self._slab, device, disk_folders)
        self.sub_groups = self._lay_out()
        self.units: list[UnitState] = []
        self._packing: Packing | None = None
        """The memory of the persistent unit, the same for every plan."""
        self._shadows: dict[tuple[Range, ...], Shadow] = {}
        """The memory of the eager units, by their ranges. Another plan with the same units keeps it."""

    def set_plan(self, plan: UpdatePlan) -> None:
        """Make ``units`` the units of ``plan``, reserve their memory, and move their gradients.

        States on the accelerator and in shadows were written back. Raise the device's out-of-memory error, or
        ``HostMemoryError`` if the host cannot provide the shadows; then nothing has changed.
        """
        # Updates on the accelerator cannot write parameters in host memory in place.
        staging_numel = plan.largest_on_accelerator if self._params_on_host else 0
        staging = self._device.empty(staging_numel, self._params[0].dtype) if staging_numel else None
        placed = zip(plan.workload.units, plan.placements, strict=True)
        units = [self._unit(unit, placement, staging) for unit, placement in placed]
        shadows = {plan.workload.units[unit].ranges: units[unit] for unit in plan.eager}
        self._shadows = {ranges: self._shadow(ranges, unit) for ranges, unit in shadows.items()}
        for ranges, unit in shadows.items():
            unit.shadow = self._shadows[ranges]
        self._move_gradients(units)
        self.units = units

    def narrow_moments(self) -> None:
        """Keep moments in the dtype of the masters, without their values, from the ``set_plan`` on that must follow."""
        self.dtypes = StateDtypes(self.dtypes.master, self.dtypes.master)
        self._shadows = {}
        self.sub_groups = self._lay_out()

    @property
    def parts(self) -> list[UnitPart]:
        return [part for unit in self.units for part in unit.parts]

    def release_params(self) -> None:
        """Drop the parameters until ``replace_params``: DeepSpeed frees its flat buffers in ``offload_states()``."""
        self.replace_params([torch.empty_like(param, device="meta") for param in self._params])

    def replace_params(self, params: Sequence[torch.Tensor]) -> None:
        """Update ``params`` from now on: DeepSpeed reallocates its flat buffers in ``reload_states()``."""
        if all(param is known for param, known in zip(params, self._params, strict=True)):
            return
        self._params = list(params)
        for part in self.parts:
            part.replace_param(part.elements.view(self._params[part.sub_group]))

    def lock(self) -> None:
        """Lock the pages of the slab and of disk slots. Raise ``HostMemoryError`` if refused."""
        self._slab.lock()
        for slot in self.disk.slots if self.disk else ():
            slot.lock()

    @contextmanager
    def pageable_states(self) -> Iterator[None]:
        """Unlock the states inside this context if some are on disk."""
        # Stock's load copies whole tensors to the GPU. A copy engine accepts none of which only a part is page-locked.
        if self.disk is None:
            yield
            return
        self._slab.unlock()
        try:
            yield
        finally:
            self._slab.lock()

    @property
    def untouched(self) -> list[AdamTensors]:
        """Return the tensors whose pages the threads that update them should touch first: all but units on disk."""
        parts = [part for unit in self.units if unit.disk is None for part in unit.parts]
        return [self.sub_groups[part.sub_group].narrow(part.elements) for part in parts]

    def close(self) -> None:
        """Drop the states and close the slab. No operation that reads or writes the states may be in flight."""
        self.units = []
        self.sub_groups = []
        self._shadows = {}
        self._packing = None
        if self.disk is not None:
            self.disk.close()
        self._slab.close()

    def _lay_out(self) -> list[AdamTensors]:
        """Return the tensors of each sub-group: ``param`` is for rounded parameters, if a CPU update needs them."""
        by_name = {**self.dtypes.by_name, "grad": self._grad_dtype, "rounded": self._params[0].dtype}
        tensors: list[dict[str, torch.Tensor]] = [{} for _ in self._params]
        for tensor in self._slab_tensors:
            tensors[tensor.sub_group][tensor.name] = self._slab.tensor(
                tensor.offset_bytes, tensor.numel, by_name[tensor.name]
            )
        return [AdamTensors(param=named.pop("rounded", None), **named) for named in tensors]

    def _unit(self, unit: Unit, placement: Placement, staging: torch.Tensor | None) -> UnitState:
        is_packed = unit.is_persistent and self._publishes
        if is_packed and self._packing is None:
            dtype = self._params[0].dtype
            self._packing = Packing(self._device.empty_host(unit.length, dtype), self._device.empty(unit.length, dtype))
        packing = self._packing if is_packed else None
        parts = [self._part(*placed, packing) for placed in zip(unit.ranges, unit.offsets, strict=True)]
        disk = self.disk.units[unit.ranges] if self.disk is not None and unit.is_on_disk else None
        state = UnitState(placement=placement, parts=parts, packing=packing, disk=disk)
        if not state.is_on_accelerator:
            return state
        grad = self._device.empty(unit.length, parts[0].grad.dtype)
        for part in parts:
            part.grad = part.of_unit(grad)
            part.staged = None if staging is None else part.of_unit(staging.narrow(0, 0, unit.length))
        if placement is Placement.RESIDENT:
            state.resident = Resident(Slot.reserve(self._device, unit.length, self.dtypes))
        return state

    def _part(self, run: Range, offset: int, packing: Packing | None) -> UnitPart:
        flat = self._params[run.sub_group]
        elements = ElementRange(begin=run.begin, end=run.end, sub_group_numel=flat.numel())
        on_host, param = self.sub_groups[run.sub_group].narrow(elements), elements.view(flat)
        if packing is not None:
            rounded = packing.on_host.narrow(0, offset, run.numel)
        elif not self._publishes:
            rounded = param
        else:
            # Without rounding, the masters are published themselves.
            rounded = on_host.master if on_host.param is None else on_host.param
        return UnitPart(
            sub_group=run.sub_group,
            elements=elements,
            offset=offset,
            states=UpdatedStates(on_host.master, on_host.exp_avg, on_host.exp_avg_sq),
            grad=on_host.grad,
            param=param,
            rounded=rounded,
        )

    def _shadow(self, ranges: tuple[Range, ...], unit: UnitState) -> Shadow:
        """Return memory for the second version of an eager unit's states, and let its steps leave ``param`` alone."""
        # Pages that only the CPU uses stay untouched: the threads that update the unit place them.
        for part in unit.parts:
            if part.rounded is part.param:
                master, dtype = part.states.master, part.param.dtype
                has_its_dtype = dtype == master.dtype
                part.rounded = master if has_its_dtype else self._device.empty_host(part.elements.numel, dtype)
        assert not (self._params_on_host and unit.is_on_accelerator), "ADOPT copies to an accelerator"
        known = self._shadows.get(ranges)
        if known is not None and (known.is_locked or not unit.is_on_accelerator):
            return Shadow(known.parts, known.is_locked)
        versions = [self._second_version(part, is_locked=unit.is_on_accelerator) for part in unit.parts]
        return Shadow(versions, unit.is_on_accelerator)

    def _second_version(self, part: UnitPart, *, is_locked: bool) -> UpdatedStates:
        numel, dtypes, states = part.elements.numel, self.dtypes.by_name, {}
        # A copy engine uses all states of a streamed unit, and of a CPU unit masters that are published.
        locked = [name for name in dtypes if is_locked or (name == "master" and part.publishes_master)]
        locked = locked if self._publishes else []
        for names, reserve in ((locked, self._device.host_slab), (dtypes.keys() - locked, HostSlab)):
            if names:
                slab, offset_bytes = reserve(sum(aligned(numel * dtypes[name].itemsize) for name in names)), 0
                for name in names:
                    states[name] = slab.tensor(offset_bytes, numel, dtypes[name])
                    offset_bytes += aligned(numel * dtypes[name].itemsize)
                if names is locked:
                    slab.lock()
        return UpdatedStates(**states)

    def _move_gradients(self, units: Sequence[UnitState]) -> None:
        """Copy the gradients to the buffers of ``units`` through the slab. The host waits. None is being reduced."""
        # Users may still read the gradients of the last step, and an open window adds to its sums.
        for part in _on_accelerator(self.units):
            self._device.copy(self._slab_grad(part), part.grad)
        for part in _on_accelerator(units):
            self._device.copy(part.grad, self._slab_grad(part))
        moved = self._device.event()
        self._device.current_stream().record(moved)
        moved.synchronize()

    def _slab_grad(self, part: UnitPart) -> torch.Tensor:
        return part.elements.view(self.sub_groups[part.sub_group].grad)


def _on_accelerator(units: Sequence[UnitState]) -> list[UnitPart]:
    return [part for unit in units if unit.is_on_accelerator for part in unit.parts]
