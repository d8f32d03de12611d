"""Keep a sub-group in the split form, next to the whole one that it is compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from deep_opt_states.device.kernels.adam import AdamTensors
from deep_opt_states.device.kernels.split_form import halves, join, split
from tests.kernels.adam_steps import copied


@dataclass
class SplitCopy:
    """The split form of a sub-group: the ``memory`` of its masters, and the ``tensors`` that a kernel takes."""

    memory: torch.Tensor
    tensors: AdamTensors

    @classmethod
    def create(cls, whole: AdamTensors) -> SplitCopy:
        tensors = copied(whole)
        split(tensors.master, tensors.exp_avg_sq)
        lower, upper = halves(tensors.master)
        return cls(tensors.master, replace(tensors, master=lower, param=upper))

    def joined(self) -> AdamTensors:
        """Return copies of the tensors in their ordinary form."""
        memory, tensors = self.memory.clone(), copied(self.tensors)
        join(memory, tensors.exp_avg_sq)
        return replace(tensors, master=memory)


def joined(tensors: AdamTensors) -> AdamTensors:
    """Return copies in the ordinary form of the ``tensors`` of a kernel that updates split masters."""
    assert tensors.param is not None
    memory = torch.empty(tensors.master.numel())
    for half, found in zip(halves(memory), (tensors.master, tensors.param), strict=True):
        half.copy_(found)
    return SplitCopy(memory, tensors).joined()
