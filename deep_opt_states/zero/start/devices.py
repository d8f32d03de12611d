"""Choose the device for DeepSpeed's accelerator, and decide which sub-groups and how much memory it can take."""

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
"""Share of the GPU memory that the optimizer may use by default. The need of the activations is not known at start."""


@dataclass(frozen=True)
class AcceleratorChoice:
    """The accelerator that DeepSpeed trains on, as the plugin uses it."""

    device: Device[Any]
    slots_on_host: bool
    """Whether the accelerator is the CPU: staging slots are in host memory, and the CPU kernel updates them, too."""

    def memory_for_states_bytes(self, gpu_memory_gb: float | None) -> int:
        """Return how much accelerator memory a plan may use for optimizer states, in bytes.

        ``gpu_memory_gb`` is the limit that the config sets, in gigabytes; None for the default share. Return 0 for the
        CPU, which has no memory of its own, and where nothing can be updated on the accelerator.
        """
        if self.slots_on_host or self.why_no_device_adam():
            return 0
        return _memory_bytes(gpu_memory_gb)

    def fits_accumulators(self, plan: UpdatePlan, grad_bytes: int, gpu_memory_gb: float | None) -> bool:
        """Return whether all gradients fit on the accelerator in addition to the states that ``plan`` places there.

        ``grad_bytes`` is per parameter; ``gpu_memory_gb`` is the limit that the config sets, None for the default
        share. The CPU has no memory of its own: there, gradients are accumulated on the accelerator if ``plan`` updates
        anything on it, because such a plan reserves memory for them.
        """
        if self.slots_on_host:
            return _num_on_device(plan) > 0
        return accelerator_bytes_with_all_gradients(plan, grad_bytes) <= _memory_bytes(gpu_memory_gb)

    def headroom(self, plan: UpdatePlan, config: Config) -> Headroom | None:
        """Return how many slots can be added to those of ``plan``, to prefetch into them during backward.

        Return None if none can: on the CPU, without ``overlap_backward``, if the config limits the GPU memory, and if
        every streamed sub-group has a slot already.
        """
        schedule, streamed = plan.schedule, plan.placements.count(Placement.STREAMED)
        if self.slots_on_host or not config.overlap_backward or config.gpu_memory_gb is not None:
            return None
        if streamed == schedule.num_slots:
            return None
        return Headroom(
            slot_bytes=bytes_of_slots(1, schedule.slot_numel),
            margin_bytes=int(config.gpu_memory_margin_gb * GB),
            max_slots=streamed - schedule.num_slots,
        )

    def why_no_device_adam(self) -> str:
        """Return why sub-groups cannot be updated on the accelerator, with the remedy; empty if they can.

        The first call runs the kernel once, which takes seconds if Triton has not compiled it before.
        """
        return "" if self.slots_on_host else _no_gpu_adam()

    def why_only_the_cpu_updates(self) -> str:
        """Return why ``"planned"`` places nothing on the accelerator, with the remedy; empty if it may."""
        if self.slots_on_host:
            return "the accelerator is the CPU, which has the states in its memory already."
        return self.why_no_device_adam()

    def validate(self, plan: UpdatePlan) -> UpdatePlan:
        """Return ``plan`` if this accelerator can run it. Raise ``Unsupported`` otherwise."""
        on_device = _num_on_device(plan)
        if on_device and (problem := self.why_no_device_adam()):
            raise Unsupported(
                f"{CONFIG_KEY}.placement: streamed and resident sub-groups need a GPU Adam kernel that gives the same "
                f"bits as the CPU kernel; found {on_device} of them, and no such kernel.\n{problem}\n"
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
        """Return the kernel that updates the sub-groups that ``plan`` places on the accelerator, if there are any.

        The kernel is compiled for both dtypes of gradients here, so that no step compiles. ``optimizer`` supplies the
        hyperparameters. Raise ``KernelUnavailable`` if the kernel cannot be used.
        """
        if self.slots_on_host:
            return host_adam
        if not _num_on_device(plan):
            return None
        kernel = gpu_adam(optimizer.defaults["betas"], adamw=optimizer.adam_w_mode)
        # Gradients that the user has accessed are in fp32 (see ``Gradients.writable_fp32``).
        kernel.compile({grad_dtype, torch.float32}, [param_dtype])
        return kernel


def choose_device() -> AcceleratorChoice:
    """Return the device for DeepSpeed's accelerator. Raise ``Unsupported`` unless that is CUDA or the CPU."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return AcceleratorChoice(HostDevice(), slots_on_host=True)
    if accelerator.device_name() == "cuda":
        return AcceleratorChoice(CudaDevice(accelerator.current_device()), slots_on_host=False)
    raise Unsupported(
        f'The accelerator must be "cuda" or "cpu", found {accelerator.device_name()!r}.\n'
        f'Set "enabled": false in "{CONFIG_KEY}" to train with stock DeepSpeed on it.'
    )


def _memory_bytes(gpu_memory_gb: float | None) -> int:
    if gpu_memory_gb is None:
        _, total_bytes = torch.cuda.mem_get_info()
        return int(SHARE_OF_GPU_MEMORY * total_bytes)
    return int(gpu_memory_gb * GB)


def _num_on_device(plan: UpdatePlan) -> int:
    return sum(placement is not Placement.CPU for placement in plan.placements)


@cache
def _no_gpu_adam() -> str:
    try:
        training_gpu_adam()
    except KernelUnavailable as unavailable:
        return str(unavailable)
    return ""
