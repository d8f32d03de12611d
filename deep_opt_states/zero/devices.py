"""The device for DeepSpeed's accelerator, and what can be placed on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed.accelerator import get_accelerator

from deep_opt_states.device.cuda import CudaDevice
from deep_opt_states.device.host import HostDevice
from deep_opt_states.device.interface import Device
from deep_opt_states.names import CONFIG_KEY
from deep_opt_states.zero.refusals import Unsupported
from perf_model.placement import Placement
from perf_model.plan import UpdatePlan


@dataclass(frozen=True)
class AcceleratorChoice:
    """``steps_on_host``: slots are host memory, where the CPU kernel updates them, too."""

    device: Device[Any]
    steps_on_host: bool

    @property
    def memory_for_states_bytes(self) -> int:
        """What a plan may take of the accelerator: the CPU has no memory of its own, and CUDA no kernel yet."""
        return 0

    def accept(self, plan: UpdatePlan) -> UpdatePlan:
        """``plan``, if this accelerator can run it; raises ``Unsupported`` otherwise."""
        on_device = sum(placement is not Placement.CPU for placement in plan.placements)
        if not self.steps_on_host and on_device:
            raise Unsupported(
                f"{CONFIG_KEY}.placement: streamed and resident sub-groups need a GPU Adam kernel that gives the CPU "
                f"kernel's bits, which this release does not have; found {on_device} of them.\n"
                f'Use "placement": "cpu" on this accelerator.'
            )
        return plan


def choose_device() -> AcceleratorChoice:
    """Raises ``Unsupported`` for an accelerator other than CUDA and the CPU."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return AcceleratorChoice(HostDevice(), steps_on_host=True)
    if accelerator.device_name() == "cuda":
        return AcceleratorChoice(CudaDevice(accelerator.current_device()), steps_on_host=False)
    raise Unsupported(
        f'The accelerator must be "cuda" or "cpu", found {accelerator.device_name()!r}.\n'
        f'Set "enabled": false in "{CONFIG_KEY}" to train with stock DeepSpeed on it.'
    )
