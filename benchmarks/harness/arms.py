"""What is compared: how an engine is configured, and how we know that it is what it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from deepspeed.accelerator import get_accelerator

from benchmarks.harness.ablated import bound_to_physical_cores, stocks_cpu_kernel
from benchmarks.harness.setting import Setting

STAGE_3 = "DeepSpeedZeroOptimizer_Stage3"
SUPER_OFFLOAD = "SuperOffloadOptimizer_Stage3"
OURS = "DeepOptimizerStates_Stage3"

CUDA_ONLY = "runs on CUDA only, says DeepSpeed 0.19.8"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """``offload`` and ``zero`` are merged into stock's blocks of these names, ``block`` is ours.

    ``exact``: whether it claims Adam's bits. ``around`` is entered for as long as its engine lives.
    """

    name: str
    optimizer_class: str = STAGE_3
    offload: Mapping[str, Any] = field(default_factory=dict)
    zero: Mapping[str, Any] = field(default_factory=dict)
    block: Mapping[str, Any] | None = None
    clipping: float | None = 1.0
    offloads: bool = True
    exact: bool = True
    cuda_only: bool = False
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def waived(self) -> str | None:
        return CUDA_ONLY if self.cuda_only and get_accelerator().device_name() != "cuda" else None

    def configure(self, config: dict[str, Any]) -> dict[str, Any]:
        """Of a config without ZeRO."""
        zero: dict[str, Any] = {"stage": 3, **config["zero_optimization"], **self.zero}
        if self.offloads:
            zero["offload_optimizer"] = {"device": "cpu", **self.offload}
        configured = {**config, "zero_optimization": zero}
        if self.clipping is not None:
            configured["gradient_clipping"] = self.clipping
        if self.block is not None:
            configured["deep_optimizer_states"] = dict(self.block)
        return configured


def ours(name: str, **block: Any) -> Arm:
    return Arm(name=name, optimizer_class=OURS, block=block)


AT_ONCE = {"overlap_backward": False, "overlap_forward": False}

STOCK = Arm(name="stock")
STOCK_BOUND = Arm(name="stock, cores bound", exact=False, around=bound_to_physical_cores)
"""With another number of threads PyTorch adds in another order."""

STOCK_PAGEABLE = Arm(name="stock, pageable gradients", offload={"pin_memory": False})
NO_OFFLOAD = Arm(name="no offload", offloads=False, exact=False)
"""Its Adam is PyTorch's on the accelerator, which rounds otherwise."""

SUPER = Arm(
    name="SuperOffload", optimizer_class=SUPER_OFFLOAD, offload={"super_offload": True}, exact=False, cuda_only=True
)
SUPER_UNCLIPPED = Arm(
    name="SuperOffload, no clipping",
    optimizer_class=SUPER_OFFLOAD,
    offload={"super_offload": True},
    clipping=None,
    exact=False,
    cuda_only=True,
)
ZENFLOW = Arm(
    name="ZenFlow (approximate)",
    zero={"zenflow": {"topk_ratio": 0.1, "update_interval": 4, "full_warm_up_rounds": 0, "overlap_step": True}},
    exact=False,
    cuda_only=True,
)

STRIDE_2 = ours("stride 2", placement="stride", update_stride=2, **AT_ONCE)
ALL_CPU = ours("ours, all on the CPU", placement="cpu", **AT_ONCE)
ALL_STREAMED = ours("ours, all streamed", placement="streamed", **AT_ONCE)
PLANNED = ours("ours, planned", **AT_ONCE)
OURS_AS_IT_IS = ours("ours")

WITHOUT_FUSED_KERNEL = replace(ALL_CPU, name="ours, stock's kernel", around=stocks_cpu_kernel)
BACKWARD = ours("ours, planned, backward overlap", overlap_backward=True, overlap_forward=False)

ABLATION = (STOCK_PAGEABLE, STOCK, WITHOUT_FUSED_KERNEL, ALL_CPU, PLANNED, BACKWARD, OURS_AS_IT_IS)
"""Each has one thing more than the one before: asynchronous gradients, our schedule, the fused kernel, streaming, and
overlap with backward and with forward."""


def competitors(setting: Setting) -> tuple[Arm, ...]:
    """DeepSpeed's own ways to update, and ours by placement; Twin-Flow with the memory of our slots, two of the largest
    sub-group."""
    slots = min(1.0, setting.sub_group_size * SLOT_BYTES / (TWIN_FLOW_BYTES * setting.parameters))
    own = (STOCK, STOCK_BOUND, twin_flow(slots), SUPER, SUPER_UNCLIPPED, ZENFLOW)
    return (*own, STRIDE_2, ALL_CPU, ALL_STREAMED, PLANNED)


TWIN_FLOW_BYTES = 16
"""Of a parameter that it updates on the accelerator: p, m, v and its gradient in fp32."""

SLOT_BYTES = 2 * 12


def twin_flow(share_on_accelerator: float) -> Arm:
    """``share_on_accelerator`` of the parameters are updated there, by PyTorch's Adam, which rounds otherwise than that
    of stock offload."""
    return Arm(name="Twin-Flow", offload={"ratio": round(1 - share_on_accelerator, 4)}, exact=False)
