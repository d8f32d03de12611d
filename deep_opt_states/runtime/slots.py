"""Staging slots on the accelerator: reserved once, taken over by one streamed sub-group after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deep_opt_states.device.interface import Device


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
