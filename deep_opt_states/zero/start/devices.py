"""The device for DeepSpeed's accelerator, and what can be placed on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam

from deep_opt_states.config import Config
from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.cuda import CudaDevice
from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamKernel
from deep_opt_states.device.kernels.choice import gpu_adam
from deep_opt_states.device.kernels.library import KernelUnavailable
from deep_opt_states.names import CONFIG_KEY
from deep_opt_states.profiler.adam_kernels import training_gpu_adam
from deep_opt_states.runtime.headroom import Headroom
from deep_opt_states.zero.start.refusals import Unsupported
from perf_model.prediction.memory import accelerator_bytes_with_all_gradients
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import bytes_of_slots
from perf_model.units import GB

SHARE_OF_GPU_MEMORY = 0.1
"""What the optimizer takes where the config does not say: how much the activations need is not known at start."""


@dataclass(frozen=True)
class AcceleratorChoice:
    """``steps_on_host``: slots are host memory, where the CPU kernel updates them, too."""

    device: Device[Any]
    steps_on_host: bool

    def memory_for_states_bytes(self, gpu_memory_gb: float | None) -> int:
        """What a plan may take of the accelerator: nothing of the CPU, which has no memory of its own."""
        if self.steps_on_host or self.no_device_adam():
            return 0
        return _memory_bytes(gpu_memory_gb)

    def has_room_for_sums(self, plan: UpdatePlan, grad_bytes: int, gpu_memory_gb: float | None) -> bool:
        """Whether all gradients, of ``grad_bytes`` a parameter, can stay here beside the states that ``plan`` has here.

        The CPU has no memory of its own: there they stay where something is updated here, as such a plan has room for.
        """
        if self.steps_on_host:
            return _on_device(plan) > 0
        return accelerator_bytes_with_all_gradients(plan, grad_bytes) <= _memory_bytes(gpu_memory_gb)

    def headroom(self, plan: UpdatePlan, config: Config) -> Headroom | None:
        """For slots beyond those of ``plan``, to prefetch into during backward. None where there is nothing to add: on
        the CPU, where the config limits what is taken, and where every streamed sub-group has a slot."""
        schedule, streamed = plan.schedule, plan.placements.count(Placement.STREAMED)
        if self.steps_on_host or not config.overlap_backward or config.gpu_memory_gb is not None:
            return None
        if streamed == schedule.num_slots:
            return None
        return Headroom(
            slot_bytes=bytes_of_slots(1, schedule.slot_numel),
            margin_bytes=int(config.gpu_memory_margin_gb * GB),
            most=streamed - schedule.num_slots,
        )

    def no_device_adam(self) -> str:
        """What keeps sub-groups from being updated on the accelerator, and the remedy; empty where nothing does.

        The first call tries it, which takes seconds where Triton has not compiled the kernel before.
        """
        return "" if self.steps_on_host else _no_gpu_adam()

    def why_only_the_cpu_updates(self) -> str:
        """Return why ``"planned"`` places nothing on the accelerator, with the remedy; empty where it may."""
        if self.steps_on_host:
            return "the accelerator is the CPU, which has the states in its memory already."
        return self.no_device_adam()

    def accept(self, plan: UpdatePlan) -> UpdatePlan:
        """``plan``, if this accelerator can run it; raises ``Unsupported`` otherwise."""
        on_device = _on_device(plan)
        if on_device and (problem := self.no_device_adam()):
            raise Unsupported(
                f"{CONFIG_KEY}.placement: streamed and resident sub-groups need a GPU Adam kernel that gives the CPU "
                f"kernel's bits; found {on_device} of them, and no such kernel.\n{problem}\n"
                f'Or use "placement": "cpu" on this accelerator.'
            )
        return plan

    def device_adam(
        self,
        plan: UpdatePlan,
        host_adam: AdamKernel,
        optimizer: DeepSpeedCPUAdam,
        grad_dtype: torch.dtype,
        param_dtype: torch.dtype,
    ) -> AdamKernel | None:
        """What updates what ``plan`` places on the accelerator; ready, so that no step compiles. None if nothing is.

        ``optimizer`` has the hyperparameters. Raises ``KernelUnavailable``.
        """
        if self.steps_on_host:
            return host_adam
        if not _on_device(plan):
            return None
        kernel = gpu_adam(optimizer.defaults["betas"], adamw=optimizer.adam_w_mode)
        # Gradients that users have seen are fp32.
        kernel.compile({grad_dtype, torch.float32}, [param_dtype])
        return kernel


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


def _memory_bytes(gpu_memory_gb: float | None) -> int:
    if gpu_memory_gb is None:
        _, total_bytes = torch.cuda.mem_get_info()
        return int(SHARE_OF_GPU_MEMORY * total_bytes)
    return int(gpu_memory_gb * GB)


def _on_device(plan: UpdatePlan) -> int:
    return sum(placement is not Placement.CPU for placement in plan.placements)


@cache
def _no_gpu_adam() -> str:
    try:
        training_gpu_adam()
    except KernelUnavailable as unavailable:
        return str(unavailable)
    return ""
