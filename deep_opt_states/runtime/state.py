"""Hold the tensors of one unit on one rank, and of each of its ranges.

``UnitState`` holds the parts of a unit, one per range. ``Slot`` is accelerator memory for the states of one unit: of
the streamed units that pass through it, or of one resident unit, with the parts one behind the other. Only
``Slot.reserve`` allocates, and nothing here copies or waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import STATES, AdamTensors, ElementRange, RangeUpdate
from perf_model.schedule.placement import Placement

Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Destinations and sources, in the order in which they are copied."""


@dataclass(frozen=True)
class Slot:
    """Accelerator memory for the optimizer states of one unit at a time: fp32 tensors of shape [slot_numel]."""

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    @classmethod
    def reserve(cls, device: Device[Any], numel: int) -> Slot:
        """Allocate the slot's tensors, of ``numel`` elements each. Raise the device's error if memory is short."""
        return cls(*(device.empty(numel, torch.float32) for _ in range(3)))

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the tensors in the order of ``STATES``."""
        return self.master, self.exp_avg, self.exp_avg_sq


@dataclass(eq=False)
class Resident:
    """The states of one resident unit on the accelerator, and how they relate to those in host memory."""

    states: Slot
    is_loaded: bool = False
    """Whether they are the states of the last update. If not, those in host memory are."""
    is_updated: bool = False
    """Whether they were updated since they were loaded, so that those in host memory are older."""


@dataclass(eq=False)
class UnitPart:
    """The tensors of one range of a unit, of shape [numel] each: ``elements`` of the sub-group ``sub_group``.

    - ``offset`` is the position of the first element in the unit's memory on the accelerator. - ``master``, ``exp_avg``
    and ``exp_avg_sq`` are fp32, views of the sub-group's tensors in the slab in host memory. - ``grad`` is in the
    accumulation dtype, on the accelerator if the unit is streamed or resident, else on the host. - ``param``, in the
    model's dtype, is a view of DeepSpeed's flat buffer: on the accelerator, or in page-locked host memory if DeepSpeed
    offloads parameters. - ``rounded``, in that dtype in host memory, is what a CPU update publishes: ``param`` itself
    where the CPU can write it, so that nothing is copied; ``master`` for an fp32 model, except in the persistent unit.
    - ``staged``, in that dtype on the accelerator, receives updated parameters if ``param`` is in host memory, and is
    copied there; None otherwise. All units share it, which is safe because one stream both updates and copies.
    """

    sub_group: int
    elements: ElementRange
    offset: int
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
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
        if self.rounded is self.param:
            self.rounded = param
        self.param = param

    def of_unit(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of this part of ``tensor``, memory of the whole unit on the accelerator."""
        numel = self.elements.numel
        # A schedule makes many views per action. Most of the time to issue is saved if a whole tensor needs no view.
        return tensor if numel == tensor.numel() else tensor.narrow(0, self.offset, numel)

    def cpu_update(self) -> RangeUpdate:
        """Return the update on the CPU."""
        # The parameters of an fp32 model on the accelerator are published from the master weights.
        param = None if self.rounded is self.master else self.rounded
        return self._update((self.master, self.exp_avg, self.exp_avg_sq), param)

    def accelerator_update(self, states: Slot) -> RangeUpdate:
        """Return the update on the accelerator, where ``states`` holds the optimizer states of the unit."""
        param = self.param if self.staged is None else self.staged
        return self._update([self.of_unit(tensor) for tensor in states.tensors], param)

    def _update(self, states: Sequence[torch.Tensor], param: torch.Tensor | None) -> RangeUpdate:
        master, exp_avg, exp_avg_sq = states
        tensors = AdamTensors(master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grad=self.grad, param=param)
        return RangeUpdate(sub_group=self.sub_group, tensors=tensors, element_range=self.elements)


@dataclass(frozen=True)
class Packing:
    """Memory that the parameters of the persistent unit are published through, of shape [numel] in the model's dtype.

    A model contains hundreds of such parameters, and each copy costs some microseconds. So the CPU writes all of them
    to ``on_host``, one copy brings them to ``on_accelerator``, and a kernel distributes them.
    """

    on_host: torch.Tensor
    on_accelerator: torch.Tensor


@dataclass(eq=False)
class UnitState:
    """The ``parts`` of one unit, one per range. ``placement`` is where they are updated.

    ``resident`` is the accelerator memory of a resident unit; None otherwise. ``packing`` is that of the persistent
    unit if its parameters are published; None otherwise.
    """

    placement: Placement
    parts: Sequence[UnitPart]
    resident: Resident | None = None
    packing: Packing | None = None

    @property
    def length(self) -> int:
        """Return the elements of the unit's memory on the accelerator."""
        return self.parts[-1].offset + self.parts[-1].elements.numel

    @property
    def is_on_accelerator(self) -> bool:
        """Return whether the gradient is on the accelerator, and the unit is updated there."""
        return self.placement is not Placement.CPU

    def copied_states(self, states: Slot) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the tensors in host memory and those in ``states`` that are copied between the two, in memory order."""
        for name, on_accelerator in zip(STATES, states.tensors, strict=True):
            yield from ((getattr(part, name), part.of_unit(on_accelerator)) for part in self.parts)

    def publications(self) -> tuple[Copies, Copies]:
        """Return the copies that publish the parameters, and those that distribute them within the accelerator.

        There are none if the update writes the model's own parameters.
        """
        if self.is_on_accelerator:
            return [(part.param, part.staged) for part in self.parts if part.staged is not None], []
        if self.packing is None:
            return [(part.param, part.rounded) for part in self.parts if not part.cpu_writes_param], []
        distributed = [(part.param, part.of_unit(self.packing.on_accelerator)) for part in self.parts]
        return [(self.packing.on_accelerator, self.packing.on_host)], distributed
