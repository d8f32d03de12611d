"""What we do not support, refused at start: the rule, the value found, the remedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

from deep_opt_states.names import CONFIG_KEY
from deep_opt_states.zero.internals.compat import SUPPORTED_DEEPSPEED, is_supported


class Unsupported(ValueError):
    """The plugin is enabled together with something it does not support."""


@dataclass(frozen=True)
class Rule:
    """Holds if ``accepts(find(...))``; ``find`` reads a ``DeepSpeedConfig``, or an engine and its optimizer."""

    key: str
    must: str
    remedy: str
    find: Callable[..., Any]
    accepts: Callable[[Any], bool]


def refuse_config(ds_config: Any) -> None:
    """What the config alone tells. Raises ``Unsupported`` with a message for every rule that is broken.

    Rules are tried group by group, since a later group reads what an earlier one makes sure is there.
    """
    for rules in (_VERSION, _STAGE, _CONFIG):
        _refuse(rules, ds_config)


def refuse_engine(engine: Any, basic_optimizer: Any) -> None:
    """What only the engine and the optimizer that it was given tell. Raises ``Unsupported``."""
    for rules in (_ENGINE, _HYPERPARAMETERS):
        _refuse(rules, engine, basic_optimizer)


def _refuse(rules: tuple[Rule, ...], *subject: Any) -> None:
    broken = []
    for rule in rules:
        found = rule.find(*subject)
        if not rule.accepts(found):
            broken.append(f"{rule.key}: {rule.must}, found {found}.\n{rule.remedy}")
    if broken:
        raise Unsupported(f'"{CONFIG_KEY}" is enabled, but not everything it needs is.\n' + "\n".join(broken))


def _device(offload_config: Any) -> str:
    return "none" if offload_config is None else OffloadDeviceEnum(offload_config.device).value


def _qualified_name(optimizer: Any) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _not_numbers(optimizer: Any) -> list[str]:
    """Return every hyperparameter that is not a number, as ``eps=None in param group 0``.

    ``DeepSpeedCPUAdam`` converts them to numbers only when it updates, and the update has begun by then. It would
    convert a tensor, too, but a scheduler of PyTorch's writes the next learning rate into that tensor in place, while
    the update that has been begun with it is still running.
    """
    wrong = []
    for index, group in enumerate(optimizer.param_groups):
        names = [name for name in ("lr", "eps", "weight_decay") if not isinstance(group[name], Real)]
        if not _is_pair(group["betas"]):
            names.append("betas")
        wrong += [f"{name}={group[name]!r} in param group {index}" for name in names]
    return wrong


def _variants(optimizer: Any) -> list[str]:
    """Return every variant of Adam that a param group asks for and ``DeepSpeedCPUAdam`` would ignore."""
    return [
        f"{name}={group[name]!r} in param group {index}"
        for index, group in enumerate(optimizer.param_groups)
        for name in ("amsgrad", "maximize")
        if group.get(name)
    ]


def _is_pair(betas: Any) -> bool:
    return isinstance(betas, Sequence) and len(betas) == 2 and all(isinstance(beta, Real) for beta in betas)


def _model_parallel_size(mpu: Any) -> int:
    for name in ("get_model_parallel_world_size", "get_tensor_model_parallel_world_size"):
        if hasattr(mpu, name):
            return getattr(mpu, name)()
    return 1


_FP32_STATES = "Our states are fp32, as stock keeps them by default: remove it."

_VERSION = (
    Rule(
        "deepspeed",
        f"must be version {' or '.join(SUPPORTED_DEEPSPEED)}, whose internals this release knows",
        f"Install it with pip install deepspeed=={SUPPORTED_DEEPSPEED[-1]}.",
        lambda config: deepspeed.__version__,
        is_supported,
    ),
)

_STAGE = (
    Rule(
        "zero_optimization.stage",
        "must be 3",
        'Interleaved offloading moves the sub-groups of ZeRO-3: set "stage": 3, or "enabled": false in our block.',
        lambda config: config.zero_optimization_stage,
        lambda stage: stage == 3,
    ),
    Rule(
        "zero_optimization.offload_optimizer.device",
        'must be "cpu"',
        'Set "offload_optimizer": {"device": "cpu"}; NVMe offload has its own pipeline and stays with stock DeepSpeed.',
        lambda config: _device(config.zero_config.offload_optimizer),
        lambda device: device == "cpu",
    ),
)

_CONFIG = (
    Rule(
        "zero_optimization.offload_optimizer.ratio",
        "must be 1 (all optimizer states in host memory)",
        f'Twin-Flow splits them for good; remove "ratio" and use "placement" and "gpu_fraction" in "{CONFIG_KEY}".',
        lambda config: config.zero_config.offload_optimizer.ratio,
        lambda ratio: ratio == 1.0,
    ),
    Rule(
        "zero_optimization.offload_optimizer.super_offload",
        "must be false",
        'SuperOffload replaces the update that we schedule: remove "super_offload".',
        lambda config: config.zero_config.offload_optimizer.super_offload,
        lambda enabled: not enabled,
    ),
    Rule(
        "zero_optimization.zenflow",
        "must be absent",
        "ZenFlow updates with stale gradients; we promise stock's bits. Remove it.",
        lambda config: config.zero_config.zenflow,
        lambda zenflow: zenflow is None,
    ),
    Rule(
        "zero_optimization.offload_param.device",
        'must be "none" or "cpu"',
        'Keep parameters on the accelerator or in host memory: set "device": "cpu" or remove "offload_param".',
        lambda config: _device(config.zero_config.offload_param),
        lambda device: device != "nvme",
    ),
    Rule(
        "compile.deepcompile",
        "must be false",
        'DeepCompile schedules the optimizer states in its own graph passes: remove "deepcompile".',
        lambda config: config.compile_config.deepcompile,
        lambda enabled: not enabled,
    ),
    Rule(
        "bf16.bf16_master_weights_and_grads",
        "must be false",
        _FP32_STATES,
        lambda config: config.bfloat16_config.bf16_master_weights_and_grads,
        lambda enabled: not enabled,
    ),
    Rule(
        "bf16.bf16_optimizer_states",
        "must be false",
        _FP32_STATES,
        lambda config: config.bfloat16_config.bf16_optimizer_states,
        lambda enabled: not enabled,
    ),
    Rule(
        "fp16.fp16_master_weights_and_grads",
        "must be false",
        _FP32_STATES,
        lambda config: config.float16_config.fp16_master_weights_and_grads,
        lambda enabled: not enabled,
    ),
    Rule(
        "torch_autocast.dtype",
        "must not be float16",
        "Its gradient scaler steps the optimizer itself; use bfloat16, or fp16 through DeepSpeed's own fp16 block.",
        lambda config: config.torch_autocast_dtype if config.torch_autocast_enabled else None,
        lambda dtype: dtype is not torch.float16,
    ),
    Rule(
        "optimizer.type",
        'must be "Adam" or "AdamW", or absent',
        'Set "optimizer": {"type": "AdamW", ...}, or pass deepspeed.ops.adam.DeepSpeedCPUAdam to initialize().',
        lambda config: config.optimizer_name,
        lambda name: name in (None, "adam", "adamw"),
    ),
    *(
        Rule(
            f"zero_optimization.{key}",
            "must be false",
            "Quantised ZeRO++ has not been proven bit-identical with interleaved offloading: remove it.",
            lambda config, key=key: getattr(config.zero_config, key),
            lambda enabled: not enabled,
        )
        for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
    ),
    Rule(
        # DeepSpeed 0.19.8 asks for its commit_info before a step, to wait for it, and it never tells any.
        "datastates_ckpt",
        "must be absent",
        "DataStates reads states while the next update writes to them, and DeepSpeed does not wait for it: remove it, "
        'and use "checkpoint": {"writer": {"decoupled": true}} to save in the background.',
        lambda config: config.datastates_config.config if config.datastates_config.enabled else None,
        lambda found: found is None,
    ),
    Rule(
        "tensor_parallel.autotp_size",
        "must be 1",
        "Tensor parallelism (AutoTP) has not been proven bit-identical with interleaved offloading: remove it.",
        lambda config: config.tensor_parallel_config.autotp_size,
        lambda size: size <= 1,
    ),
)

_ENGINE = (
    Rule(
        "optimizer",
        "must be DeepSpeedCPUAdam (what DeepSpeed makes of Adam and AdamW when it offloads)",
        'Set "optimizer": {"type": "AdamW", ...}, or pass deepspeed.ops.adam.DeepSpeedCPUAdam to initialize(). With '
        'Accelerate or Trainer, an Adam that they make is one unless the config sets "zero_force_ds_cpu_optimizer".',
        lambda engine, optimizer: _qualified_name(optimizer),
        lambda name: name == f"{DeepSpeedCPUAdam.__module__}.{DeepSpeedCPUAdam.__qualname__}",
    ),
    Rule(
        "optimizer.fp32_optimizer_states",
        "must be true",
        _FP32_STATES,
        lambda engine, optimizer: getattr(optimizer, "fp32_optimizer_states", True),
        bool,
    ),
    Rule(
        "optimizer (step hooks)",
        "must be none",
        "The update does not run in the optimizer's step(), so they would see no parameters: remove them.",
        lambda engine, optimizer: sum(
            len(getattr(optimizer, hooks, ())) for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        ),
        lambda count: count == 0,
    ),
    Rule(
        "mpu (model-parallel size)",
        "must be 1",
        "Model parallelism has not been proven bit-identical with interleaved offloading: train without an mpu.",
        lambda engine, optimizer: _model_parallel_size(engine.mpu),
        lambda size: size <= 1,
    ),
)

_HYPERPARAMETERS = (
    Rule(
        "optimizer (hyperparameters)",
        "lr, eps and weight_decay must be numbers, and betas two numbers, in every param group",
        'Give Python numbers, or set "optimizer": {"type": "AdamW", ...}. Accelerate, and with it Trainer, makes '
        'DeepSpeedCPUAdam of optimizers that are not Adam, with the hyperparameters of those: choose "adamw_torch".',
        lambda engine, optimizer: ", ".join(_not_numbers(optimizer)),
        lambda wrong: not wrong,
    ),
    Rule(
        "optimizer (variants of Adam)",
        "amsgrad and maximize must be false",
        "DeepSpeedCPUAdam has no such update, and stock DeepSpeed would train without it: remove it.",
        lambda engine, optimizer: ", ".join(_variants(optimizer)),
        lambda found: not found,
    ),
)
