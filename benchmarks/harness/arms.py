"""What is compared: how an engine is configured, and how we know that it is what it is called."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch
from deepspeed.accelerator import get_accelerator

from benchmarks.harness.ablated import bound_to_physical_cores, stocks_cpu_kernel
from benchmarks.harness.setting import Setting
from deep_opt_states.host import machine
from perf_model.units import GB

STAGE_3 = "DeepSpeedZeroOptimizer_Stage3"
SUPER_OFFLOAD = "SuperOffloadOptimizer_Stage3"
OURS = "DeepOptimizerStates_Stage3"

CUDA_ONLY = "runs on CUDA only, says DeepSpeed 0.19.8"

SHARED_MEMORY = "/dev/shm"
STATE_BYTES = 16
"""Of a parameter without offloading: p, m and v in fp32, and 16-bit parameter and gradient."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """``offload`` and ``zero`` are merged into stock's blocks of these names, ``block`` is ours.

    ``inner`` and ``kernel`` are the classes that update: DeepSpeed's, and in ours on the CPU. ``bounded``: it may take
    ``Setting.accelerator_bytes``. ``exact``: whether it claims Adam's bits. ``done``: whether its update is when
    ``step()`` returns. ``around`` is entered for as long as its engine lives.
    """

    name: str
    optimizer_class: str = STAGE_3
    inner: str = "DeepSpeedCPUAdam"
    kernel: str = ""
    offload: Mapping[str, Any] = field(default_factory=dict)
    zero: Mapping[str, Any] = field(default_factory=dict)
    block: Mapping[str, Any] | None = None
    clipping: float = 1.0
    offloads: bool = True
    bounded: bool = False
    exact: bool = True
    done: bool = True
    cuda_only: bool = False
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def waived(self, setting: Setting) -> str | None:
        """Why it cannot run here."""
        on_cuda = get_accelerator().device_name() == "cuda"
        if self.cuda_only and not on_cuda:
            return CUDA_ONLY
        # Their states are shared with a process of theirs: a full folder would end this one, without an error.
        if self.cuda_only and psutil.disk_usage(SHARED_MEMORY).free < STATE_BYTES * setting.parameters:
            return f"{SHARED_MEMORY} has no room for its states"
        if not self.offloads:
            room = torch.cuda.mem_get_info()[1] if on_cuda else machine.memory().usable_bytes
            if STATE_BYTES * setting.parameters > room:
                return "does not fit"
        return None

    def configure(self, setting: Setting) -> dict[str, Any]:
        config = setting.config
        zero: dict[str, Any] = {"stage": 3, **config["zero_optimization"], **self.zero}
        if self.offloads:
            zero["offload_optimizer"] = {"device": "cpu", **self.offload}
        # DeepSpeed 0.19.8 clips to 1.0 where nothing is said.
        configured = {**config, "zero_optimization": zero, "gradient_clipping": self.clipping}
        if self.block is not None:
            memory = {"gpu_memory_gb": setting.accelerator_bytes / GB} if self.bounded else {}
            configured["deep_optimizer_states"] = {**memory, **self.block}
        return configured

    def check(self, engine: Any) -> str:
        """What says that ``engine`` is this arm's; raises ``AssertionError`` if it is not."""
        optimizer = engine.optimizer
        found = type(optimizer).__name__
        inner = type(optimizer.optimizer).__name__
        assert found == self.optimizer_class, f"{self.name}: the optimizer is {found}"
        assert inner == self.inner, f"{self.name}: it updates by {inner}"
        assert engine.gradient_clipping() == self.clipping, f"{self.name}: clips to {engine.gradient_clipping()}"
        told = f"{found} over {inner}, clipping {self.clipping}, overlap_comm {engine.zero_overlap_comm()}"
        told += f", {torch.get_num_threads()} threads on {len(os.sched_getaffinity(0))} CPUs"
        offload = engine.zero_offload_optimizer()
        assert (offload is not None) == self.offloads, f"{self.name}: offloads to {offload}"
        if offload is not None:
            told += f", pin_memory {offload.pin_memory}"
            on_accelerator = int((1 - optimizer.partial_offload) * len(optimizer.fp16_groups))
            assert (on_accelerator > 0) == ("ratio" in self.offload), f"{self.name}: ratio {optimizer.partial_offload}"
            if on_accelerator:
                told += f", {on_accelerator} of {len(optimizer.fp16_groups)} sub-groups on the accelerator"
        if self.block is not None:
            config, kernel = optimizer._config, type(optimizer._adam).__name__
            assert kernel == self.kernel, f"{self.name}: the CPU updates by {kernel}"
            told += f", {kernel}, overlap_backward {config.overlap_backward}, overlap_forward {config.overlap_forward}"
        return told


def ours(name: str, **block: Any) -> Arm:
    return Arm(name=name, optimizer_class=OURS, kernel="FusedAdam", block=block)


def planned(name: str, **block: Any) -> Arm:
    return replace(ours(name, **block), bounded=True)


AT_ONCE = {"overlap_backward": False, "overlap_forward": False}

STOCK = Arm(name="stock")
"""DeepSpeed's defaults. The size of sub-groups is the setting's, for all arms: norms are added up by sub-group, and
with other sub-groups no arm would have its bits."""

STOCK_BOUND = Arm(name="stock, cores bound", exact=False, around=bound_to_physical_cores)
"""With another number of threads PyTorch adds in another order."""

STOCK_UNCLIPPED = Arm(name="stock, no clipping", clipping=0.0, exact=False)
"""What SuperOffload without clipping is compared with."""

STOCK_PAGEABLE = Arm(name="stock, pageable gradients", offload={"pin_memory": False})
NO_OFFLOAD = Arm(name="no offload", inner="FusedAdam", offloads=False, exact=False)
"""DeepSpeed's Adam on the accelerator rounds otherwise."""

SUPER = Arm(
    name="SuperOffload", optimizer_class=SUPER_OFFLOAD, offload={"super_offload": True}, exact=False, cuda_only=True
)
SUPER_UNCLIPPED = replace(SUPER, name="SuperOffload, no clipping", clipping=0.0, done=False)
"""It updates in backward."""

ZENFLOW = Arm(
    name="ZenFlow (approximate)",
    inner="ZenFlowCPUAdam",
    zero={"zenflow": {"topk_ratio": 0.1, "update_interval": 4, "full_warm_up_rounds": 0, "overlap_step": True}},
    exact=False,
    done=False,
    cuda_only=True,
)

STRIDE_2 = ours("stride 2, one slot", placement="stride", update_stride=2, num_slots=1, **AT_ONCE)
"""The rule of the original artifact and its single buffer, by our runtime and kernels, which flatter it."""

ALL_CPU = ours("ours, all on the CPU", placement="cpu", **AT_ONCE)
ALL_STREAMED = ours("ours, all streamed", placement="streamed", **AT_ONCE)
PLANNED = planned("ours, planned", **AT_ONCE)
OURS_AS_IT_IS = planned("ours")

WITHOUT_FUSED_KERNEL = replace(ALL_CPU, name="ours, stock's kernel", kernel="StockAdam", around=stocks_cpu_kernel)
BACKWARD = planned("ours, planned, backward overlap", overlap_backward=True, overlap_forward=False)

ABLATION = {
    "": STOCK_PAGEABLE,
    "asynchronous gradients": STOCK,
    "our schedule": WITHOUT_FUSED_KERNEL,
    "fused kernel": ALL_CPU,
    "streaming": PLANNED,
    "overlap with backward": BACKWARD,
    "overlap with forward": OURS_AS_IT_IS,
}
"""By what each has more than the one before."""

STREAMED_AND_OVERLAPPED = ours("ours, 70% streamed, both overlaps", placement="fraction", gpu_fraction=0.7)

TWIN_FLOW_BYTES = 16
"""Of a parameter that it updates on the accelerator: p, m, v and its gradient in fp32."""


def competitors(setting: Setting) -> tuple[Arm, ...]:
    """DeepSpeed's own ways to update, and ours by placement. What is aimed for is measured next to stock: memory may be
    faster some seconds later, where others share it."""
    others = (STOCK_BOUND, STOCK_UNCLIPPED, twin_flow(setting), SUPER, SUPER_UNCLIPPED, ZENFLOW)
    return (STOCK, ALL_CPU, *others, STRIDE_2, ALL_STREAMED, PLANNED)


def twin_flow(setting: Setting) -> Arm:
    """As many whole sub-groups on the accelerator as ours may take memory for, one at least; it updates them there by
    PyTorch's Adam, which rounds otherwise than that of stock offload."""
    sub_groups = -(-setting.parameters // setting.sub_group_size)
    there = setting.accelerator_bytes // (TWIN_FLOW_BYTES * setting.sub_group_size)
    # DeepSpeed rounds down.
    share = (min(max(there, 1), sub_groups - 1) + 0.5) / sub_groups
    return Arm(name="Twin-Flow", offload={"ratio": round(1 - share, 4)}, exact=False)
