"""Choose the device for DeepSpeed's accelerator, and decide which units and how much memory it can take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from deep_opt_states.config import Config, Unsupported
from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.cuda import CudaDevice
from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamKernel, StateDtypes
from deep_opt_states.device.kernels.choice import gpu_adam
from deep_opt_states.device.kernels.library import KernelUnavailable
from deep_opt_states.names import CONFIG_KEY
from deep_opt_states.profiler.profile import training_gpu_adam
from deep_opt_states.zero.step.gpu_memory import GpuBudget
from perf_model.prediction.memory import TrainingSetup, memory_of
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.units import GB

SHARE_FOR_SUMS = 0.1
"""The largest share of GPU memory that states and sums of gradients may take with placements from the config."""


@dataclass(frozen=True)
class AcceleratorChoice:
    """The accelerator that DeepSpeed trains on."""

    device: Device[Any]
    slots_on_host: bool
    """Whether the accelerator is the CPU, whose kernel also updates the staging slots."""

    def gpu_budget(self, config: Config) -> GpuBudget | None:
        """Return how much accelerator memory the planner may use; None for the CPU."""
        # Without a limit in the config it starts at 0: training must not need more memory than with stock.
        if self.slots_on_host:
            return None
        limit = 0.0 if _no_gpu_adam() else config.gpu_memory_gb
        return GpuBudget(
            start_bytes=0 if limit is None else int(limit * GB),
            margin_bytes=int(config.gpu_memory_margin_gb * GB),
            fills=limit is None,
        )

    def fits_accumulators(self, plan: UpdatePlan, setup: TrainingSetup, budget: GpuBudget | None) -> bool:
        """Return whether the sums of gradients that ``setup`` needs fit on the accelerator with ``plan``."""
        # On the CPU, ``plan`` reserves memory for them as soon as it updates anything there.
        if self.slots_on_host:
            return _num_on_device(plan) > 0
        allowed_bytes = int(SHARE_FOR_SUMS * torch.cuda.mem_get_info()[1]) if budget is None else budget.bytes
        return memory_of(plan, replace(setup, sums_on_accelerator=True)).gpu_bytes <= allowed_bytes

    def why_only_the_cpu_updates(self) -> str:
        """Return why ``"planned"`` places nothing on the accelerator, with the remedy; empty if it may."""
        host = "the accelerator is the CPU, which has the states in its memory already."
        return host if self.slots_on_host else _no_gpu_adam()

    def validate(self, plan: UpdatePlan) -> UpdatePlan:
        """Return ``plan``, or raise ``Unsupported`` if this accelerator cannot run it."""
        on_device = _num_on_device(plan)
        if on_device and not self.slots_on_host and (problem := _no_gpu_adam()):
            raise Unsupported(
                f"{CONFIG_KEY}.placement: streamed and resident units need a GPU Adam kernel that gives the same "
                f"bits as the CPU kernel; found {on_device} of them, and no such kernel.\n{problem}\n"
                f'Or use "placement": "cpu" on this accelerator.'
            )
        return plan

    def device_adam(
        self, plan: UpdatePlan, budget: GpuBudget | None, host_adam: AdamKernel, optimizer: Any, dtypes: StateDtypes
    ) -> AdamKernel | None:
        """Return the compiled kernel for the units of ``optimizer`` on the accelerator; None if all are on the CPU."""
        if self.slots_on_host:
            return host_adam
        if not _num_on_device(plan) and (budget is None or _no_gpu_adam()):
            return None
        adam = optimizer.optimizer
        kernel = gpu_adam(adam.defaults["betas"], adamw=adam.adam_w_mode, dtypes=dtypes)
        param_dtype = optimizer.fp16_partitioned_groups_flat[0].dtype
        # A load may put the moments in the dtype of the masters (``GuardedStates._adopt_loaded_states``).
        for states in dict.fromkeys((dtypes, StateDtypes(dtypes.master, dtypes.master))):
            # Gradients that the user has accessed have the dtype of the masters (``Gradients.writable``).
            kernel.compile({optimizer.gradient_accumulation_dtype, dtypes.master}, [param_dtype], states)
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


def _num_on_device(plan: UpdatePlan) -> int:
    return sum(placement is not Placement.CPU for placement in plan.placements)


@cache
def _no_gpu_adam() -> str:
    """Return why units cannot be updated on the GPU, with the remedy; empty if they can."""
    try:
        training_gpu_adam()
    except KernelUnavailable as unavailable:
        return str(unavailable)
    return ""
