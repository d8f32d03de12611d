"""Hold the tensors of one sub-group on one rank, and the ranges in which they are updated.

``SubGroupState`` has the sub-group's optimizer states, gradient and parameters, each where the placement keeps it.
``Slot`` is accelerator memory that streamed sub-groups pass through. ``Split`` separates the ranges that are updated
before ``step()`` returns from the rest, which the schedule updates. None of them allocates, copies or waits, except
``Slot.reserve``, which allocates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamTensors, ElementRange


@dataclass(frozen=True)
class Slot:
    """Accelerator memory for the optimizer states of one streamed sub-group at a time.

    All three tensors are fp32 and have shape [slot_numel]: the number of elements of the largest streamed sub-group.
    """

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    @classmethod
    def reserve(cls, device: Device[Any], numel: int) -> Slot:
        """Allocate the slot's tensors, of ``numel`` elements each. Raise the device's error if memory is short."""
        return cls(*(device.empty(numel, torch.float32) for _ in range(3)))

    def narrow(self, numel: int) -> Slot:
        """Return views of the first ``numel`` elements, which a sub-group of that size uses."""
        tensors = (self.master, self.exp_avg, self.exp_avg_sq)
        return Slot(*(tensor.narrow(0, 0, numel) for tensor in tensors))


@dataclass
class SubGroupState:
    """The tensors of this rank's partition of one sub-group, of shape [numel] each.

    ``master``, ``exp_avg`` and ``exp_avg_sq`` are fp32. They are in host memory, unless the sub-group is resident.

    ``grad`` has the dtype in which it was accumulated. It is on the accelerator if the sub-group is updated there,
    which means streamed or resident, else in host memory.

    ``param`` is the flat buffer that the model's parameters are views of, in the model's dtype. It is on the
    accelerator, or in page-locked host memory if DeepSpeed offloads parameters.

    ``rounded``, in that dtype in host memory, is the source that a CPU update is published from. It is ``param`` itself
    where the CPU can write ``param``, so that publishing copies nothing. For an fp32 model it is ``master``. It is None
    for a sub-group that is not updated on the CPU.

    ``staged``, in that dtype on the accelerator, receives the parameters of an update on the accelerator if ``param``
    is in host memory; they are copied to ``param`` from there. It is None otherwise. All sub-groups share this memory,
    which is safe because one stream both updates and copies.
    """

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor
    param: torch.Tensor
    rounded: torch.Tensor | None
    staged: torch.Tensor | None = None

    @property
    def numel(self) -> int:
        """Return the number of elements of this rank's partition."""
        return self.master.numel()

    @property
    def cpu_writes_param(self) -> bool:
        """Return whether a CPU update writes the model's own parameters, so that there is nothing to publish."""
        return self.rounded is self.param or self.staged is not None

    def replace_param(self, param: torch.Tensor) -> None:
        """Update ``param`` from now on: DeepSpeed reallocates its flat buffers in ``reload_states()``."""
        if self.rounded is self.param:
            self.rounded = param
        self.param = param

    @property
    def cpu_tensors(self) -> AdamTensors:
        """Return the tensors of an update on the CPU."""
        assert self.rounded is not None
        return AdamTensors(
            master=self.master,
            exp_avg=self.exp_avg,
            exp_avg_sq=self.exp_avg_sq,
            grad=self.grad,
            # The parameters of an fp32 model on the accelerator are published from the master weights.
            param=None if self.rounded is self.master else self.rounded,
        )

    @property
    def slab_tensors(self) -> AdamTensors:
        """Return ``cpu_tensors`` without the model's own parameters, which are not in the slab."""
        return replace(self.cpu_tensors, param=None) if self.rounded is self.param else self.cpu_tensors

    def accelerator_tensors(self, states: SubGroupState | Slot) -> AdamTensors:
        """Return the tensors of an update on the accelerator.

        ``states`` has the optimizer states there: the slot of a streamed sub-group, or a resident's own.
        """
        return AdamTensors(
            master=states.master,
            exp_avg=states.exp_avg,
            exp_avg_sq=states.exp_avg_sq,
            grad=self.grad,
            param=self.param if self.staged is None else self.staged,
        )


@dataclass(frozen=True)
class Split:
    """The ranges of one sub-group, in order: those that are updated early, and the rest.

    The early ranges hold DeepSpeed's persistent parameters, which are updated before ``step()`` returns. Together the
    ranges cover the sub-group exactly once. None of them is empty.
    """

    early: tuple[ElementRange, ...]
    rest: tuple[ElementRange, ...]

    @classmethod
    def create(cls, numel: int, early: Iterable[tuple[int, int]] = ()) -> Split:
        """Split a sub-group of ``numel`` elements by its ``early`` ranges [begin, end), which must not overlap.

        They may be in any order. Adjacent ranges are merged, and empty ones are dropped.
        """
        merged: list[tuple[int, int]] = []
        for begin, end in sorted(early):
            if merged and merged[-1][1] == begin:
                begin, _ = merged.pop()
            if begin < end:
                merged.append((begin, end))
        borders = [0, *(border for early_range in merged for border in early_range), numel]
        between = zip(borders[::2], borders[1::2], strict=True)
        return cls(
            early=tuple(ElementRange(begin=begin, end=end, sub_group_numel=numel) for begin, end in merged),
            rest=tuple(
                ElementRange(begin=begin, end=end, sub_group_numel=numel) for begin, end in between if begin < end
            ),
        )
