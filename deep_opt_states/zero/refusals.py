"""What we do not support, refused at start: the rule, the value found, the remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

from deep_opt_states.config import CONFIG_KEY
from deep_opt_states.zero.compat import SUPPORTED_DEEPSPEED, is_supported


class Unsupported(ValueError):
    """The plugin is enabled together with something it does not support."""


@dataclass(frozen=True)
class Rule:
    """``must`` holds if ``accepts(find(engine, basic_optimizer))``."""

    key: str
    must: str
    remedy: str
    find: Callable[[Any, Any], Any]
    accepts: Callable[[Any], bool]


def refuse_unsupported(engine: Any, basic_optimizer: Any) -> None:
    """Raises ``Unsupported`` with a message for every rule that is broken.

    Rules are tried group by group, since a later group reads what an earlier one makes sure is there.
    """
    for rules in (_VERSION, _STAGE, _OFFLOAD, _REST):
        broken = []
        for rule in rules:
            found = rule.find(engine, basic_optimizer)
            if not rule.accepts(found):
                broken.append(f"{rule.key}: {rule.must}, found {found}.\n{rule.remedy}")
        if broken:
            raise Unsupported(f'"{CONFIG_KEY}" is enabled, but not everything it needs is.\n' + "\n".join(broken))


def refuse_stage_0(stage: int) -> None:
    """Stage 0 never asks for a ZeRO optimizer, so the engine's seam does not see it; its config does."""
    if stage == 0:
        rule = _STAGE[0]
        raise Unsupported(
            f'"{CONFIG_KEY}" is enabled, but not everything it needs is.\n'
            f"{rule.key}: {rule.must}, found {stage}.\n{rule.remedy}"
        )


def _optimizer_name(engine: Any, basic_optimizer: Any) -> str:
    kind = type(basic_optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


def _device(offload_config: Any) -> str:
    return "none" if offload_config is None else OffloadDeviceEnum(offload_config.device).value


_TURN_OFF = f'Or set "enabled": false in "{CONFIG_KEY}".'

_VERSION = (
    Rule(
        "deepspeed",
        f"must be version {' or '.join(SUPPORTED_DEEPSPEED)}, whose internals this release knows",
        f"Install it with pip install deepspeed=={SUPPORTED_DEEPSPEED[-1]}. {_TURN_OFF}",
        lambda engine, optimizer: deepspeed.__version__,
        is_supported,
    ),
)

_STAGE = (
    Rule(
        "zero_optimization.stage",
        "must be 3",
        f'Interleaved offloading moves the sub-groups of ZeRO-3: set "stage": 3. {_TURN_OFF}',
        lambda engine, optimizer: engine.zero_optimization_stage(),
        lambda stage: stage == 3,
    ),
)

_OFFLOAD = (
    Rule(
        "zero_optimization.offload_optimizer.device",
        'must be "cpu"',
        'Set "offload_optimizer": {"device": "cpu"}; NVMe offload has its own pipeline and stays with stock DeepSpeed.',
        lambda engine, optimizer: _device(engine.zero_offload_optimizer()),
        lambda device: device == "cpu",
    ),
)

_REST = (
    Rule(
        "zero_optimization.offload_optimizer.ratio",
        "must be 1 (all optimizer states in host memory)",
        f'Twin-Flow splits them for good; remove "ratio" and use "placement" and "gpu_fraction" in "{CONFIG_KEY}".',
        lambda engine, optimizer: engine.zero_partial_offload(),
        lambda ratio: ratio == 1.0,
    ),
    Rule(
        "zero_optimization.offload_optimizer.super_offload",
        "must be false",
        'SuperOffload replaces the update that we schedule: remove "super_offload".',
        lambda engine, optimizer: engine.super_offload(),
        lambda enabled: not enabled,
    ),
    Rule(
        "zero_optimization.zenflow",
        "must be absent",
        "ZenFlow updates with stale gradients; we promise stock's bits. Remove it.",
        lambda engine, optimizer: engine.zenflow_config(),
        lambda zenflow: zenflow is None,
    ),
    Rule(
        "zero_optimization.offload_param.device",
        'must be "none" or "cpu"',
        'Keep parameters on the accelerator or in host memory: set "device": "cpu" or remove "offload_param".',
        lambda engine, optimizer: _device(engine.zero_offload_param()),
        lambda device: device != "nvme",
    ),
    Rule(
        "compile.deepcompile",
        "must be false",
        'DeepCompile schedules the optimizer states in its own graph passes: remove "deepcompile".',
        lambda engine, optimizer: engine.is_deepcompile_enabled(),
        lambda enabled: not enabled,
    ),
    Rule(
        "bf16.bf16_master_weights_and_grads",
        "must be false",
        "Our states are fp32, as stock keeps them by default: remove it.",
        lambda engine, optimizer: engine.bf16_master_weights_and_gradients(),
        lambda enabled: not enabled,
    ),
    Rule(
        "bf16.bf16_optimizer_states",
        "must be false",
        "Our states are fp32, as stock keeps them by default: remove it.",
        lambda engine, optimizer: engine.bf16_optimizer_states(),
        lambda enabled: not enabled,
    ),
    Rule(
        "fp16.fp16_master_weights_and_grads",
        "must be false",
        "Our states are fp32, as stock keeps them by default: remove it.",
        lambda engine, optimizer: engine.fp16_master_weights_and_gradients(),
        lambda enabled: not enabled,
    ),
    Rule(
        "torch_autocast.dtype",
        "must not be float16",
        "Its gradient scaler steps the optimizer itself; use bfloat16, or fp16 through DeepSpeed's own fp16 block.",
        lambda engine, optimizer: engine.torch_autocast_dtype() if engine.torch_autocast_enabled() else None,
        lambda dtype: dtype is not torch.float16,
    ),
    Rule(
        "optimizer",
        "must be DeepSpeedCPUAdam (what DeepSpeed makes of Adam and AdamW when it offloads)",
        'Set "optimizer": {"type": "AdamW", ...}, or pass deepspeed.ops.adam.DeepSpeedCPUAdam to initialize().',
        _optimizer_name,
        lambda name: name == f"{DeepSpeedCPUAdam.__module__}.{DeepSpeedCPUAdam.__qualname__}",
    ),
    Rule(
        "optimizer.fp32_optimizer_states",
        "must be true",
        "Our kernels keep fp32 moments: remove it.",
        lambda engine, optimizer: getattr(optimizer, "fp32_optimizer_states", True),
        bool,
    ),
    Rule(
        "tensor_parallel.autotp_size",
        "must be 1",
        "Tensor parallelism (AutoTP) has not been proven bit-identical with interleaved offloading: remove it.",
        lambda engine, optimizer: engine.autotp_size(),
        lambda size: size <= 1,
    ),
    Rule(
        "mpu (model-parallel size)",
        "must be 1",
        "Model parallelism has not been proven bit-identical with interleaved offloading: train without an mpu.",
        lambda engine, optimizer: _model_parallel_size(engine.mpu),
        lambda size: size <= 1,
    ),
)


def _model_parallel_size(mpu: Any) -> int:
    for name in ("get_model_parallel_world_size", "get_tensor_model_parallel_world_size"):
        if hasattr(mpu, name):
            return getattr(mpu, name)()
    return 1
