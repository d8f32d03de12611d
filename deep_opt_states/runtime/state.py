"""What the runtime knows of one sub-group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamTensors, Part


@dataclass
class SubGroupState:
    """Tensors of shape [numel], this rank's partition of the sub-group.

    ``master``, ``exp_avg`` and ``exp_avg_sq`` are fp32 in host memory. ``grad``, in the dtype in which it was
    accumulated, is where the sub-group is updated: on the accelerator if it is streamed, else in host memory. A
    resident's tensors are all on the accelerator.

    ``param`` is the flat buffer that the model's parameters are views of, in the model's dtype. It is on the
    accelerator, or in page-locked host memory if DeepSpeed offloads parameters.

    ``rounded``, in that dtype in host memory, is what a CPU update is published from: ``param`` where the CPU can write
    it, and copying it to itself does nothing; else ``master`` for an fp32 model. It is None for a sub-group that is not
    updated on the CPU.

    ``staged``, in that dtype on the accelerator, is what an update on the accelerator is copied down to ``param`` from,
    where that is in host memory, and None elsewhere. All sub-groups share this memory: one stream updates and copies.
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
        return self.master.numel()

    @property
    def cpu_writes_param(self) -> bool:
        """Return whether a CPU update writes the model's own parameters, so that there is nothing to publish."""
        return self.rounded is self.param or self.staged is not None

    def use_param(self, param: torch.Tensor) -> None:
        """Update ``param`` from now on: DeepSpeed reallocates its flat buffers in ``reload_states()``."""
        if self.rounded is self.param:
            self.rounded = param
        self.param = param

    @property
    def on_host(self) -> AdamTensors:
        """Of what is updated on the CPU."""
        assert self.rounded is not None
        return AdamTensors(
            master=self.master,
            exp_avg=self.exp_avg,
            exp_avg_sq=self.exp_avg_sq,
            grad=self.grad,
            # An fp32 model's parameters on the accelerator are published from the master weights.
            param=None if self.rounded is self.master else self.rounded,
        )

    @property
    def in_slab(self) -> AdamTensors:
        """``on_host`` without the model's own parameters, where the CPU writes them."""
        return replace(self.on_host, param=None) if self.rounded is self.param else self.on_host

    def at(self, states: SubGroupState | Slot) -> AdamTensors:
        """With ``master``, ``exp_avg`` and ``exp_avg_sq`` of ``states``, on the accelerator."""
        return AdamTensors(
            master=states.master,
            exp_avg=states.exp_avg,
            exp_avg_sq=states.exp_avg_sq,
            grad=self.grad,
            param=self.param if self.staged is None else self.staged,
        )


@dataclass(frozen=True)
class Slot:
    """fp32, shape [slot_numel] each; ``narrow`` gives the part that a sub-group of ``numel`` uses."""

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    @classmethod
    def reserve(cls, device: Device[Any], numel: int) -> Slot:
        return cls(*(device.empty(numel, torch.float32) for _ in range(3)))

    def narrow(self, numel: int) -> Slot:
        parts = (self.master, self.exp_avg, self.exp_avg_sq)
        return Slot(*(tensor.narrow(0, 0, numel) for tensor in parts))


@dataclass(frozen=True)
class Split:
    """Parts of one sub-group, in order; together all of it. Neither has empty parts."""

    first: tuple[Part, ...]
    rest: tuple[Part, ...]

    @classmethod
    def of(cls, numel: int, first: Iterable[tuple[int, int]] = ()) -> Split:
        """``first``: ranges [begin, end) of the sub-group's ``numel`` elements that do not overlap."""
        merged: list[tuple[int, int]] = []
        for begin, end in sorted(first):
            if merged and merged[-1][1] == begin:
                begin, _ = merged.pop()
            if begin < end:
                merged.append((begin, end))
        borders = [0, *(border for its in merged for border in its), numel]
        between = zip(borders[::2], borders[1::2], strict=True)
        return cls(
            first=tuple(Part(begin=begin, end=end, of=numel) for begin, end in merged),
            rest=tuple(Part(begin=begin, end=end, of=numel) for begin, end in between if begin < end),
        )
