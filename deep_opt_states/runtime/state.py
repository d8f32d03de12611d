"""Hold the tensors of one unit on one rank, and the ranges in which they are updated.

``UnitState`` has the unit's optimizer states, gradient and parameters. ``Slot`` is accelerator memory for the states of
one unit: that of the streamed units that pass through it, or of one resident unit. ``Split`` separates the ranges that
are updated before ``step()`` returns from the rest, which the schedule updates. Only ``Slot.reserve`` allocates, and
none of them copies or waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamTensors, ElementRange, RangeUpdate
from perf_model.schedule.placement import Placement


@dataclass(frozen=True)
class Slot:
    """Accelerator memory for the optimizer states of one unit at a time.

    All tensors are fp32, of shape [slot_numel].
    """

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    @classmethod
    def reserve(cls, device: Device[Any], numel: int) -> Slot:
        """Allocate the slot's tensors, of ``numel`` elements each. Raise the device's error if memory is short."""
        return cls(*(device.empty(numel, torch.float32) for _ in range(3)))

    def narrow(self, numel: int) -> Slot:
        """Return views of the first ``numel`` elements, which a unit of that size uses."""
        tensors = (self.master, self.exp_avg, self.exp_avg_sq)
        return Slot(*(tensor.narrow(0, 0, numel) for tensor in tensors))


@dataclass(eq=False)
class Resident:
    """The states of one resident unit on the accelerator, and how they relate to those in host memory."""

    states: Slot
    is_loaded: bool = False
    """Whether they are the states of the last update. If not, those in host memory are."""
    is_updated: bool = False
    """Whether they were updated since they were loaded, so that those in host memory are older."""


@dataclass(eq=False)
class UnitState:
    """The tensors of one unit, of shape [numel] each.

    The unit consists of ``elements`` of the sub-group with index ``sub_group``. ``placement`` is where it is updated.

    ``master``, ``exp_avg`` and ``exp_avg_sq`` are fp32, in host memory: views of the sub-group's tensors in the slab.

    ``grad`` has the dtype in which it was accumulated. It is on the accelerator if the unit is updated there, which
    means streamed or resident, else in host memory.

    ``is_evicted``: the unit is streamed or resident, but its memory on the accelerator is given back to training. The
    CPU updates it before ``step()`` returns.

    ``param`` is a view of the flat buffer that the model's parameters are views of, in the model's dtype. It is on the
    accelerator, or in page-locked host memory if DeepSpeed offloads parameters.

    ``rounded``, in that dtype in host memory, is the source that a CPU update is published from. It is ``param`` itself
    where the CPU can write ``param``, so that publishing copies nothing. For an fp32 model it is ``master``.

    ``staged``, in that dtype on the accelerator, receives the parameters of an update on the accelerator if ``param``
    is in host memory; they are copied to ``param`` from there. It is None otherwise. All units share this memory, which
    is safe because one stream both updates and copies.

    ``resident`` is the accelerator memory of a resident unit; None otherwise.
    """

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor
    param: torch.Tensor
    rounded: torch.Tensor
    placement: Placement
    sub_group: int
    elements: ElementRange
    staged: torch.Tensor | None = None
    resident: Resident | None = None
    is_evicted: bool = False

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.elements.numel

    @property
    def is_on_accelerator(self) -> bool:
        """Return whether the gradient is on the accelerator, and the unit is updated there."""
        return self.placement is not Placement.CPU and not self.is_evicted

    @property
    def cpu_writes_param(self) -> bool:
        """Return whether a CPU update writes the model's own parameters, so that there is nothing to publish."""
        return self.rounded is self.param

    def replace_param(self, param: torch.Tensor) -> None:
        """Update ``param`` from now on: DeepSpeed reallocates its flat buffers in ``reload_states()``."""
        if self.rounded is self.param:
            self.rounded = param
        self.param = param

    def view(self, tensor: torch.Tensor, element_range: ElementRange) -> torch.Tensor:
        """Return the view of ``element_range``, in elements of the sub-group, of one of the unit's tensors."""
        return element_range.view(tensor, self.elements.begin)

    @property
    def cpu_tensors(self) -> AdamTensors:
        """Return the tensors of an update on the CPU."""
        return AdamTensors(
            master=self.master,
            exp_avg=self.exp_avg,
            exp_avg_sq=self.exp_avg_sq,
            grad=self.grad,
            # The parameters of an fp32 model on the accelerator are published from the master weights.
            param=None if self.rounded is self.master else self.rounded,
        )

    def cpu_update_of(self, element_range: ElementRange) -> RangeUpdate:
        """Return the update of a range on the CPU."""
        return self.update_of(element_range, self.cpu_tensors)

    def copied_states(self, element_range: ElementRange, states: Slot) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the tensors in host memory and those in ``states`` that are copied between the two for a range."""
        on_host = [self.view(tensor, element_range) for tensor in (self.master, self.exp_avg, self.exp_avg_sq)]
        on_accelerator = (states.master, states.exp_avg, states.exp_avg_sq)
        yield from zip(on_host, (self.view(tensor, element_range) for tensor in on_accelerator), strict=True)

    def accelerator_tensors(self, states: Slot) -> AdamTensors:
        """Return the tensors of an update on the accelerator, where ``states`` has the optimizer states."""
        return AdamTensors(
            master=states.master,
            exp_avg=states.exp_avg,
            exp_avg_sq=states.exp_avg_sq,
            grad=self.grad,
            param=self.param if self.staged is None else self.staged,
        )

    def update_of(self, element_range: ElementRange, tensors: AdamTensors) -> RangeUpdate:
        """Return the update of ``element_range``, in elements of the sub-group, of ``tensors``, those of the unit."""
        return RangeUpdate(
            sub_group=self.sub_group,
            tensors=tensors.narrow(element_range, self.elements.begin),
            element_range=element_range,
        )


@dataclass(frozen=True)
class Split:
    """The ranges of one unit, in order: those that are updated early, and the rest.

    The early ranges hold DeepSpeed's persistent parameters, which are updated before ``step()`` returns. Together the
    ranges cover the unit exactly once. None of them is empty. They count in elements of the sub-group.
    """

    early: tuple[ElementRange, ...]
    rest: tuple[ElementRange, ...]

    @classmethod
    def all_early(cls, elements: ElementRange) -> Split:
        """Return the split of a unit that is updated early as a whole."""
        return cls(early=(elements,), rest=())

    @classmethod
    def create(cls, elements: ElementRange, early: Iterable[tuple[int, int]] = ()) -> Split:
        """Split the unit of ``elements`` by the ``early`` ranges [begin, end) of its sub-group, which must not overlap.

        They may be in any order, and only their parts inside the unit count. Adjacent ranges are merged, and empty ones
        are dropped.
        """
        merged: list[tuple[int, int]] = []
        for whole_begin, whole_end in sorted(early):
            begin, end = max(whole_begin, elements.begin), min(whole_end, elements.end)
            if merged and merged[-1][1] == begin:
                begin, _ = merged.pop()
            if begin < end:
                merged.append((begin, end))
        borders = [elements.begin, *(border for early_range in merged for border in early_range), elements.end]
        between = zip(borders[::2], borders[1::2], strict=True)
        return cls(
            early=tuple(elements.part(begin, end) for begin, end in merged),
            rest=tuple(elements.part(begin, end) for begin, end in between if begin < end),
        )
