"""Hold the tensors of one unit on one rank. Only ``Slot.reserve`` allocates, and nothing here copies or waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import (
    STATES,
    AdamTensors,
    ElementRange,
    RangeUpdate,
    StateDtypes,
    UpdatedStates,
)
from deep_opt_states.runtime.disk_states import StatesInSlot
from perf_model.schedule.placement import Placement

Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of destination and source, in the order in which they are copied."""


class Slot(UpdatedStates):
    """Accelerator memory for the optimizer states of one unit at a time: tensors of shape [slot_numel]."""

    @classmethod
    def reserve(cls, device: Device[Any], numel: int, dtypes: StateDtypes) -> Slot:
        """Allocate the slot's tensors, of ``numel`` elements each. Raise the device's error if memory is short."""
        return cls(**{name: device.empty(numel, dtype) for name, dtype in dtypes.by_name.items()})


@dataclass(eq=False)
class Resident:
    """The states of a resident unit on the accelerator."""

    states: Slot
    is_loaded: bool = False
    """Whether they are up to date; if not, the states in host memory are."""
    is_updated: bool = False
    """Whether they are newer than the states in host memory."""


@dataclass(eq=False)
class Shadow:
    """The second version of the states of one eager unit, in host memory: one entry per range.

    The step of an update reads the current version and writes the other one. ``is_current`` changes at its COMMIT or
    ADOPT. If ``is_locked``, a copy engine reads and writes all of it.
    """

    parts: Sequence[UpdatedStates]
    is_locked: bool = False
    is_current: bool = False


@dataclass(eq=False)
class UnitPart:
    """The tensors of one range of a unit, of shape [numel] each: ``elements`` of the sub-group ``sub_group``.

    - ``offset``: the position of the first element in the unit's memory on the accelerator.
    - ``states``: views of the sub-group's tensors in the slab.
    - ``grad``: in the accumulation dtype, on the device that updates the unit.
    - ``param``: in the model's dtype, a view of DeepSpeed's flat buffer, which is in pinned memory if offloaded.
    - ``rounded``: the tensor in host memory that a CPU update publishes: ``param`` itself where the CPU can write it,
      or ``states.master`` if that has the model's dtype, except in the persistent unit. In an eager unit it is not
      ``param``, and ``states.master`` means the masters of the current version.
    - ``staged``: memory on the accelerator for updated parameters if ``param`` is in host memory. All units share it,
      which is safe because one stream both updates and copies.
    """

    sub_group: int
    elements: ElementRange
    offset: int
    states: UpdatedStates
    grad: torch.Tensor
    param: torch.Tensor
    rounded: torch.Tensor
    staged: torch.Tensor | None = None

    @property
    def cpu_writes_param(self) -> bool:
        """Return whether a CPU update writes the model's own parameters, so that there is nothing to publish."""
        return self.rounded is self.param

    def replace_param(self, param: torch.Tensor) -> None:
        """Update ``param`` from now on: DeepSpeed reallocates its flat buffers in ``reload_states()``."""
        if self.cpu_writes_param:
            self.rounded = param
        self.param = param

    def of_unit(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of this part of ``tensor``, memory of the whole unit on the accelerator."""
        numel = self.elements.numel
        # Views take much of the time to issue an action, and a whole tensor needs none.
        return tensor if numel == tensor.numel() else tensor.narrow(0, self.offset, numel)

    @property
    def publishes_master(self) -> bool:
        """Return whether the masters are published, so that a CPU update rounds to no other tensor."""
        return self.rounded is self.states.master

    def cpu_update(self, states: UpdatedStates, updated: UpdatedStates | None = None) -> RangeUpdate:
        """Return the update of ``states`` on the CPU, in place or from one version of the states to the other."""
        return self._update(states, None if self.publishes_master else self.rounded, updated)

    def accelerator_update(self, states: Slot, rounded: torch.Tensor | None = None) -> RangeUpdate:
        """Return the update of the unit's ``states`` on the accelerator, which writes ``param``, or to ``rounded``."""
        param = self.param if self.staged is None else self.staged
        return self._update(
            UpdatedStates(*map(self.of_unit, states)), param if rounded is None else self.of_unit(rounded)
        )

    def _update(
        self, states: UpdatedStates, param: torch.Tensor | None, updated: UpdatedStates | None = None
    ) -> RangeUpdate:
        tensors = AdamTensors(**states._asdict(), grad=self.grad, param=param)
        return RangeUpdate(sub_group=self.sub_group, tensors=tensors, element_range=self.elements, updated=updated)


@dataclass(frozen=True)
class Packing:
    """Memory, of shape [numel], through which one copy publishes the hundreds of persistent parameters."""

    on_host: torch.Tensor
    on_accelerator: torch.Tensor


@dataclass(eq=False)
class UnitState:
    """The ``parts`` of one unit, one per range, and the memory of its kind: ``disk``, by slot, for one on disk."""

    placement: Placement
    parts: Sequence[UnitPart]
    resident: Resident | None = None
    packing: Packing | None = None
    shadow: Shadow | None = None
    disk: Sequence[StatesInSlot] | None = None

    @property
    def length(self) -> int:
        """Return the elements of the unit's memory on the accelerator."""
        return self.parts[-1].offset + self.parts[-1].elements.numel

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the gradients and the parameters, which the caller may replace between two updates."""
        return [tensor for part in self.parts for tensor in (part.grad, part.param)]

    @property
    def is_on_accelerator(self) -> bool:
        """Return whether the unit is updated on the accelerator, where its gradient also is."""
        return self.placement is not Placement.CPU

    def version(self, *, updated: bool = False, disk_slot: int | None = None) -> Sequence[UpdatedStates]:
        """Return the current version of the states in host memory by range, or the one that an update writes."""
        if self.disk is not None and disk_slot is not None:
            return self.disk[disk_slot].parts
        if self.shadow is None or self.shadow.is_current is updated:
            return [part.states for part in self.parts]
        return self.shadow.parts

    def cpu_updates(self, disk_slot: int | None = None) -> list[RangeUpdate]:
        """Return the updates on the CPU: in place, or from the current version of an eager unit to the other one."""
        placed = zip(self.parts, self.version(disk_slot=disk_slot), strict=True)
        if self.shadow is None:
            return [part.cpu_update(states) for part, states in placed]
        others = self.version(updated=True)
        return [part.cpu_update(states, other) for (part, states), other in zip(placed, others, strict=True)]

    def copied_states(self, states: Slot, *, updated: bool = False) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pairs of a tensor of ``version`` and its part of ``states``, in memory order."""
        version = self.version(updated=updated)
        for name, on_accelerator in zip(STATES, states, strict=True):
            for part, on_host in zip(self.parts, version, strict=True):
                yield getattr(on_host, name), part.of_unit(on_accelerator)

    def publications(self, disk_slot: int | None = None) -> tuple[Copies, Copies]:
        """Return the copies that publish the parameters, and the copies within the accelerator that follow."""
        if self.is_on_accelerator and self.shadow is None:
            return [(part.param, part.staged) for part in self.parts if part.staged is not None], []
        if self.packing is not None:
            distributed = [(part.param, part.of_unit(self.packing.on_accelerator)) for part in self.parts]
            return [(self.packing.on_accelerator, self.packing.on_host)], distributed
        placed = zip(self.parts, self.version(disk_slot=disk_slot), strict=True)
        sources = [(part, states.master if part.publishes_master else part.rounded) for part, states in placed]
        return [(part.param, source) for part, source in sources if not part.cpu_writes_param], []
