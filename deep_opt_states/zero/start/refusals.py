"""Refuse unsupported configurations at start, with the rule, the value found and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from operator import attrgetter
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

from deep_opt_states.config import Config
from deep_opt_states.names import CONFIG_KEY
from deep_opt_states.zero.internals.compat import num_step_hooks, param_dict
from deep_opt_states.zero.internals.releases import TESTED_DEEPSPEED, is_at_least
from deep_opt_states.zero.start.unsupported import Unsupported

_INSTALL_NEWEST = f"Install it with pip install deepspeed=={TESTED_DEEPSPEED[-1]}"
"""The start of the remedy where this release of DeepSpeed lacks something."""


@dataclass(frozen=True)
class Rule:
    """A condition that the configuration must meet: ``accepts(find(...))`` must be true.

    ``find`` reads the value from a ``DeepSpeedConfig``, or from an engine and its optimizer. ``key`` is the dotted key
    that the message names, ``must`` the rule in words, and ``remedy`` the change that the user can make.
    """

    key: str
    must: str
    remedy: str
    find: Callable[..., Any]
    accepts: Callable[[Any], bool]


def refuse_config(ds_config: Any) -> None:
    """Check the rules that depend on the config alone.

    Rules are checked group by group, because a later group reads values that an earlier group guarantees to exist.
    Raise ``Unsupported`` with one message for each broken rule of the first group that has any.
    """
    for rules in (_LATER_FEATURES, _STAGE, _CONFIG):
        _refuse(rules, ds_config)


def refuse_engine(engine: Any, basic_optimizer: Any) -> None:
    """Check the rules that depend on the engine and on the optimizer that was passed to it. Raise ``Unsupported``."""
    for rules in (_ENGINE, _HYPERPARAMETERS):
        _refuse(rules, engine, basic_optimizer)


def refuse_later_methods(engine: Any) -> None:
    """Make each method that this release lacks raise ``Unsupported``, which names the release that has it."""
    for method, since in _LATER_METHODS.items():
        if not is_at_least(deepspeed.__version__, since):
            setattr(engine, method, partial(_refuse_method, method, since))


def _refuse_method(method: str, since: str) -> None:
    raise Unsupported(
        f"engine.{method}() needs DeepSpeed {since} or later, found {deepspeed.__version__}.\n"
        f"{_INSTALL_NEWEST}, or remove the call."
    )


def _refuse(rules: tuple[Rule, ...], *subject: Any) -> None:
    broken = []
    for rule in rules:
        found = rule.find(*subject)
        if not rule.accepts(found):
            broken.append(f"{rule.key}: {rule.must}, found {found}.\n{rule.remedy}")
    if broken:
        raise Unsupported(f'"{CONFIG_KEY}" is enabled, but this configuration is not supported:\n' + "\n".join(broken))


def _device(offload_config: Any) -> str:
    return "none" if offload_config is None else OffloadDeviceEnum(offload_config.device).value


def _qualified_name(optimizer: Any) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _not_numbers(optimizer: Any) -> list[str]:
    """Return every hyperparameter that is not a number, formatted as ``eps=None in param group 0``.

    ``DeepSpeedCPUAdam`` converts hyperparameters to numbers only when it updates, which is too late to refuse them. It
    would also convert a tensor. But PyTorch's schedulers write the next learning rate into such a tensor in place,
    while the update that uses it is still running.
    """
    wrong = []
    for index, group in enumerate(optimizer.param_groups):
        names = [name for name in ("lr", "eps", "weight_decay") if not isinstance(group[name], Real)]
        if not _is_pair(group["betas"]):
            names.append("betas")
        wrong += [f"{name}={group[name]!r} in param group {index}" for name in names]
    return wrong


def _variants(optimizer: Any) -> list[str]:
    """Return every variant of Adam that a param group requests and ``DeepSpeedCPUAdam`` would ignore."""
    return [
        f"{name}={group[name]!r} in param group {index}"
        for index, group in enumerate(optimizer.param_groups)
        for name in ("amsgrad", "maximize")
        if group.get(name)
    ]


def _is_pair(betas: Any) -> bool:
    return isinstance(betas, Sequence) and len(betas) == 2 and all(isinstance(beta, Real) for beta in betas)


_FP32_STATES = "The plugin keeps the optimizer states in fp32, as stock DeepSpeed does by default: remove it."


def _rule_for_later_feature(key: str, since: str, uses: Callable[[dict[str, Any]], bool]) -> Rule:
    """Return the rule that a config of which ``uses`` is true needs DeepSpeed ``since`` a release.

    An older release would fail later with an error of its own, or ignore the key.
    """

    def lacking_release(config: Any) -> str | None:
        version: str = deepspeed.__version__
        return version if uses(param_dict(config)) and not is_at_least(version, since) else None

    return Rule(
        key,
        f"needs DeepSpeed {since} or later with ZeRO-3 and offloading",
        f"{_INSTALL_NEWEST}, or remove the key.",
        lacking_release,
        lambda version: version is None,
    )


def _number(block: Any, key: str) -> float:
    """Return a number or a boolean of a block, or 0 if it is none."""
    value = block.get(key) if isinstance(block, dict) else None
    return value if isinstance(value, int | float) else 0


_LATER_FEATURES = (
    _rule_for_later_feature(
        "managed_gradient_accumulation", "0.19.5", lambda json: json.get("managed_gradient_accumulation") is False
    ),
    _rule_for_later_feature(
        "tensor_parallel", "0.19.4", lambda json: _number(json.get("tensor_parallel"), "autotp_size") > 1
    ),
    _rule_for_later_feature(
        "expert_parallel", "0.19.3", lambda json: _number(json.get("expert_parallel"), "enabled") > 0
    ),
)

_BLOCKS = {
    "bf16": "bfloat16_config",
    "compile": "compile_config",
    "fp16": "float16_config",
    "zero_optimization": "zero_config",
}
"""The attributes of a ``DeepSpeedConfig`` that contain the blocks of the user's JSON."""


def _off(key: str, remedy: str, must: str = "must be false") -> Rule:
    """Return the rule that a dotted key of the DeepSpeed config is false or absent."""
    block, _, path = key.partition(".")
    return Rule(key, must, remedy, attrgetter(f"{_BLOCKS[block]}.{path}"), lambda found: not found)


_LATER_METHODS = {"coalesce_grad_reduction": "0.19.1"}

_STAGE = (
    Rule(
        "zero_optimization.stage",
        "must be 3",
        f'Interleaved offloading works on the sub-groups of ZeRO-3: set "stage": 3, or "enabled": false in '
        f'"{CONFIG_KEY}".',
        lambda config: config.zero_optimization_stage,
        lambda stage: stage == 3,
    ),
    Rule(
        "zero_optimization.offload_optimizer.device",
        'must be "cpu"',
        'Set "offload_optimizer": {"device": "cpu"}; for NVMe offload, use stock DeepSpeed.',
        lambda config: _device(config.zero_config.offload_optimizer),
        lambda device: device == "cpu",
    ),
)

_CONFIG = (
    Rule(
        "zero_optimization.offload_optimizer.ratio",
        "must be 1 (all optimizer states in host memory)",
        f'Twin-Flow splits them permanently: remove "ratio". "placement" in "{CONFIG_KEY}" places them by unit.',
        lambda config: config.zero_config.offload_optimizer.ratio,
        lambda ratio: ratio == 1.0,
    ),
    _off(
        "zero_optimization.offload_optimizer.super_offload",
        'SuperOffload replaces the update that the plugin schedules: remove "super_offload".',
    ),
    _off(
        "zero_optimization.zenflow",
        "ZenFlow updates with stale gradients, which cannot give the same bits as stock DeepSpeed. Remove it.",
        must="must be absent",
    ),
    Rule(
        "zero_optimization.offload_param.device",
        'must be "none" or "cpu"',
        'Keep parameters on the accelerator or in host memory: set "device": "cpu" or remove "offload_param".',
        lambda config: _device(config.zero_config.offload_param),
        lambda device: device != "nvme",
    ),
    _off(
        "compile.deepcompile",
        'DeepCompile schedules the optimizer states in its own graph passes: remove "deepcompile".',
    ),
    _off("bf16.bf16_master_weights_and_grads", _FP32_STATES),
    _off("bf16.bf16_optimizer_states", _FP32_STATES),
    _off("fp16.fp16_master_weights_and_grads", _FP32_STATES),
    Rule(
        "torch_autocast.dtype",
        "must not be float16",
        "The gradient scaler of autocast calls the optimizer's step() itself: use bfloat16, or fp16 "
        "through DeepSpeed's own fp16 block.",
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
        _off(
            f"zero_optimization.zero_quantized_{what}",
            "Quantised ZeRO++ has not been tested to be bit-identical with interleaved offloading: remove it.",
        )
        for what in ("weights", "nontrainable_weights", "gradients")
    ),
    Rule(
        # Before a step, DeepSpeed 0.19.8 waits for DataStates only if it finds a commit_info, but it always finds none.
        "datastates_ckpt",
        "must be absent",
        "DataStates reads the states while the next update writes to them, and DeepSpeed does not wait for it: "
        "remove it. DeepSpeed's decoupled writer saves in the background, too, but DeepSpeed 0.19.8 loads its "
        "checkpoints only with a config without `checkpoint.writer`.",
        lambda config: config.datastates_config.config if config.datastates_config.enabled else None,
        lambda found: found is None,
    ),
)

_ENGINE = (
    Rule(
        "optimizer",
        "must be DeepSpeedCPUAdam, which DeepSpeed creates for Adam and AdamW when it offloads",
        'Set "optimizer": {"type": "AdamW", ...}, or pass deepspeed.ops.adam.DeepSpeedCPUAdam to initialize(). '
        "Accelerate and Trainer convert PyTorch Adam and AdamW to it unless the config sets "
        '"zero_force_ds_cpu_optimizer": false.',
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
        "The update does not run in the optimizer's step(), so the hooks would see no parameters: remove them.",
        lambda engine, optimizer: num_step_hooks(optimizer),
        lambda count: count == 0,
    ),
)

_HYPERPARAMETERS = (
    Rule(
        "optimizer (hyperparameters)",
        "lr, eps and weight_decay must be numbers, and betas two numbers, in every param group",
        'Give Python numbers, or set "optimizer": {"type": "AdamW", ...}. Accelerate and Trainer replace even an '
        'optimizer that is not Adam by DeepSpeedCPUAdam, but keep its hyperparameters: choose "adamw_torch".',
        lambda engine, optimizer: ", ".join(_not_numbers(optimizer)),
        lambda wrong: not wrong,
    ),
    Rule(
        "optimizer (variants of Adam)",
        "amsgrad and maximize must be false",
        "DeepSpeedCPUAdam does not implement them, and stock DeepSpeed ignores them silently: remove it.",
        lambda engine, optimizer: ", ".join(_variants(optimizer)),
        lambda found: not found,
    ),
)


def refuse_rules_without_effect(config: Config, model: torch.nn.Module, trained: Sequence[str]) -> None:
    """Raise ``ConfigError`` if a rule by name has no effect on ``model``, whose ``trained`` parameters have states."""
    names: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if names.setdefault(param, name) != name:
            aliases[name] = names[param]
    frozen = set(names.values()).difference(trained)
    config.check_names(trained, frozen, aliases)
