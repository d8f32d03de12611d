"""Configure the engines that are compared, and verify that an engine really is the variant that it is labelled as."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch

from benchmarks.harness.overrides import stocks_cpu_kernel
from benchmarks.harness.setting import TrainingSetting, trains_on_gpu
from deep_opt_states.host import machine
from perf_model.schedule.host_layout import KEYS_OF_STATES
from perf_model.units import GB

STAGE_3 = "DeepSpeedZeroOptimizer_Stage3"
SUPER_OFFLOAD = "SuperOffloadOptimizer_Stage3"
OURS_STAGE_3 = "DeepOptimizerStates_Stage3"

NO_MEMORY = "does not fit into memory"
CUDA_ONLY = "DeepSpeed 0.19.8 supports it on CUDA only"

SHARED_MEMORY = "/dev/shm"
STATE_BYTES = 16
"""Bytes per parameter without offloading: p, m and v in fp32, and the 16-bit parameter and gradient."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to configure the engine. ``name`` is its label in rows and tables.

    ``offload`` and ``zero`` are merged into stock's config blocks ``offload_optimizer`` and ``zero_optimization``;
    ``block`` is our config block, or None for variants without the plugin.
    """

    name: str
    optimizer_class: str = STAGE_3
    inner_optimizer: str = "DeepSpeedCPUAdam"
    """Class of DeepSpeed's optimizer inside the ZeRO optimizer."""
    cpu_kernel: str = ""
    """Class of the plugin's kernel that updates on the CPU."""
    offload: Mapping[str, Any] = field(default_factory=dict)
    zero: Mapping[str, Any] = field(default_factory=dict)
    block: Mapping[str, Any] | None = None
    clipping: float = 1.0
    states: str = "fp32"
    """The dtypes of masters and moments, a value of ``plan --states``."""
    offloads: bool = True
    limits_gpu_memory: bool = False
    """Whether the variant may use ``TrainingSetting.accelerator_bytes`` and no more."""
    exact: bool = True
    """Whether the variant claims to be bit-identical to stock."""
    done_in_step: bool = True
    """Whether the update is done when ``step()`` returns."""
    measures_cost: bool = False
    """Whether each run also trains without updates, as the base for the cost of the update."""
    cuda_only: bool = False
    overrides: Callable[[], AbstractContextManager[object]] = nullcontext
    """A context that is active for as long as the engine exists."""

    def waived_reason(self, setting: TrainingSetting) -> str | None:
        """Return why this variant cannot run here with ``setting``, or None if it can."""
        on_cuda = trains_on_gpu()
        if self.cuda_only and not on_cuda:
            return CUDA_ONLY
        # These variants share their states with a process of their own. If the folder is full, this process dies
        # without an error.
        if self.cuda_only and psutil.disk_usage(SHARED_MEMORY).free < STATE_BYTES * setting.parameters:
            return f"{SHARED_MEMORY} has too little free memory for the optimizer states"
        if not self.offloads:
            capacity_bytes = torch.cuda.mem_get_info()[1] if on_cuda else machine.memory().usable_bytes
            if STATE_BYTES * setting.parameters > capacity_bytes:
                return NO_MEMORY
        return None

    def config_for(self, setting: TrainingSetting) -> dict[str, Any]:
        """Return the complete DeepSpeed config."""
        config = setting.config
        zero: dict[str, Any] = {"stage": 3, **config["zero_optimization"], **self.zero}
        if self.offloads:
            zero["offload_optimizer"] = {"device": "cpu", **self.offload}
        # DeepSpeed 0.19.8 clips to 1.0 unless the config sets a value.
        configured = {**config, "zero_optimization": zero, "gradient_clipping": self.clipping}
        if keys := KEYS_OF_STATES[self.states]:
            configured["bf16"] = {**config["bf16"], **dict.fromkeys(keys, True)}
        if self.block is not None:
            memory = {"gpu_memory_gb": setting.accelerator_bytes / GB} if self.limits_gpu_memory else {}
            configured["deep_optimizer_states"] = {**memory, **self.block}
        return configured

    def verify(self, engine: Any) -> str:
        """Return a description of ``engine``. Raise ``AssertionError`` if it is not this variant's."""
        optimizer = engine.optimizer
        found = type(optimizer).__name__
        inner = type(optimizer.optimizer).__name__
        assert found == self.optimizer_class, f"{self.name}: the optimizer is {found}"
        assert inner == self.inner_optimizer, f"{self.name}: the inner optimizer is {inner}"
        assert engine.gradient_clipping() == self.clipping, f"{self.name}: clips to {engine.gradient_clipping()}"
        description = f"{found} over {inner}, clipping {self.clipping}, overlap_comm {engine.zero_overlap_comm()}"
        description += f", {torch.get_num_threads()} threads of PyTorch on {len(os.sched_getaffinity(0))} CPUs"
        offload = engine.zero_offload_optimizer()
        assert (offload is not None) == self.offloads, f"{self.name}: offloads to {offload}"
        if offload is not None:
            description += f", pin_memory {offload.pin_memory}"
            on_accelerator = int((1 - optimizer.partial_offload) * len(optimizer.fp16_groups))
            assert (on_accelerator > 0) == ("ratio" in self.offload), f"{self.name}: ratio {optimizer.partial_offload}"
            if on_accelerator:
                description += f", {on_accelerator} of {len(optimizer.fp16_groups)} sub-groups on the accelerator"
        if self.block is not None:
            config, kernel = optimizer._config, type(optimizer._assembly.context.host_adam).__name__
            assert kernel == self.cpu_kernel, f"{self.name}: the CPU kernel is {kernel}"
            description += f", {kernel}, overlap_backward {config.overlap_backward}"
            description += f", overlap_forward {config.overlap_forward}"
        return description


def ours(name: str, **block: Any) -> Variant:
    """Return a variant with the plugin, whose config block has the entries ``block``."""
    return Variant(name=name, optimizer_class=OURS_STAGE_3, cpu_kernel="FusedAdam", block=block)


def planned(name: str, **block: Any) -> Variant:
    """Return a variant with the plugin whose plan uses at most ``TrainingSetting.accelerator_bytes``."""
    return replace(ours(name, **block), limits_gpu_memory=True)


NO_OVERLAP = {"overlap_backward": False, "overlap_forward": False}

STOCK = Variant(name="stock")
"""DeepSpeed's defaults. The sub-group size is the setting's for all variants: norms are summed per sub-group, so no
variant could be bit-identical with other sub-groups."""

STOCK_UNCLIPPED = Variant(name="stock, no clipping", clipping=0.0, exact=False)
"""The variant that SuperOffload without clipping is compared with."""

STOCK_PAGEABLE = Variant(name="stock, pageable gradients", offload={"pin_memory": False})
NO_OFFLOAD = Variant(name="no offload", inner_optimizer="FusedAdam", offloads=False, exact=False)
"""Not exact, since DeepSpeed's Adam on the accelerator rounds differently."""

SUPER = Variant(
    name="SuperOffload", optimizer_class=SUPER_OFFLOAD, offload={"super_offload": True}, exact=False, cuda_only=True
)
SUPER_UNCLIPPED = replace(SUPER, name="SuperOffload, no clipping", clipping=0.0, done_in_step=False)
"""Updates in backward."""

ZENFLOW = Variant(
    name="ZenFlow (approximate)",
    inner_optimizer="ZenFlowCPUAdam",
    zero={"zenflow": {"topk_ratio": 0.1, "update_interval": 4, "full_warm_up_rounds": 0, "overlap_step": True}},
    exact=False,
    done_in_step=False,
    cuda_only=True,
)

STRIDE_2 = ours("stride 2, one slot", placement="stride", update_stride=2, num_slots=1, **NO_OVERLAP)
"""The rule of the original artifact with its single buffer. Our runtime and kernels make it faster than it was."""

ALL_CPU = ours("ours, all on the CPU", placement="cpu", **NO_OVERLAP)
ALL_STREAMED = ours("ours, all streamed", placement="streamed", **NO_OVERLAP)
PLANNED = planned("ours, planned", **NO_OVERLAP)
OURS_DEFAULT = planned("ours")

WITHOUT_FUSED_KERNEL = replace(
    ALL_CPU, name="ours, stock's kernel", cpu_kernel="StockAdam", overrides=stocks_cpu_kernel
)
BACKWARD = planned("ours, planned, backward overlap", overlap_backward=True, overlap_forward=False)

ABLATION = {
    "": STOCK_PAGEABLE,
    "asynchronous gradients": STOCK,
    "our schedule": WITHOUT_FUSED_KERNEL,
    "fused kernel": ALL_CPU,
    "streaming": PLANNED,
    "overlap with backward": BACKWARD,
    "overlap with forward": OURS_DEFAULT,
}
"""Variants by the part that each has in addition to the one before it."""

STREAMED_AND_OVERLAPPED = ours("ours, every second unit streamed, both overlaps", placement="stride", update_stride=2)

TWIN_FLOW_BYTES = 16
"""Bytes per parameter that Twin-Flow updates on the accelerator: p, m, v and the gradient in fp32."""


def competitors(setting: TrainingSetting) -> tuple[Variant, ...]:
    """Return DeepSpeed's own ways to update, and ours by placement.

    The variants of the targets come right after stock: if other users share the machine's memory, its bandwidth may
    change within seconds.
    """
    others = (STOCK_UNCLIPPED, twin_flow(setting), SUPER, SUPER_UNCLIPPED, ZENFLOW)
    return (STOCK, ALL_CPU, *others, STRIDE_2, ALL_STREAMED, PLANNED)


def twin_flow(setting: TrainingSetting) -> Variant:
    """Return Twin-Flow with as many whole sub-groups on the accelerator as fit the memory that ours may use.

    At least one sub-group is there. PyTorch's Adam updates it, which rounds differently from stock offloading's.
    """
    sub_groups = -(-setting.parameters // setting.sub_group_size)
    on_accelerator = setting.accelerator_bytes // (TWIN_FLOW_BYTES * setting.sub_group_size)
    # DeepSpeed rounds down.
    share = (min(max(on_accelerator, 1), sub_groups - 1) + 0.5) / sub_groups
    return Variant(name="Twin-Flow", offload={"ratio": round(1 - share, 4)}, exact=False)
