"""Refuse unsupported configurations at start, with the rule, the value found and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from numbers import Real
from operator import attrgetter
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

from deep_opt_states.config import Config, Unsupported
from deep_opt_states.names import CONFIG_KEY
from deep_opt_states.zero.internals.compat import has_bf16_masters, num_step_hooks, param_dict
from deep_opt_states.zero.internals.releases import TESTED_DEEPSPEED, is_at_least
from deep_opt_states.zero.start.accelerated import CONVERSION
from deep_opt_states.zero.start.older_stages import refuse_older_stage

_INSTALL_NEWEST = f"Install it with pip install deepspeed=={TESTED_DEEPSPEED[-1]}"


class Rule(NamedTuple):
    """A condition that the configuration must meet: ``find`` must return one of the ``allowed`` values."""

    key: str
    must: str
    remedy: str
    find: Callable[[Any], Any]
    allowed: Sequence[Any] = (None, False, "")


def refuse_config(ds_config: Any) -> None:
    """Raise ``Unsupported`` for the first broken group of rules: later groups read values that it guarantees."""
    refuse_older_stage(param_dict(ds_config))
    for rules in (_LATER_FEATURES, _STAGE, _CONFIG):
        _refuse(rules, ds_config)


def refuse_optimizer(basic_optimizer: Any) -> None:
    for rules in (_OPTIMIZER, _HYPERPARAMETERS):
        _refuse(rules, basic_optimizer)


def _refuse(rules: Sequence[Rule], subject: Any) -> None:
    found = [(rule, rule.find(subject)) for rule in rules]
    broken = [
        f"{rule.key}: {rule.must}, found {value}.\n{rule.remedy}" for rule, value in found if value not in rule.allowed
    ]
    if broken:
        raise Unsupported(f'"{CONFIG_KEY}" is enabled, but this configuration is not supported:\n' + "\n".join(broken))


COALESCING_SINCE = "0.19.1"


def refuse_later_methods(engine: Any) -> None:
    """Make the method that this release may lack raise ``Unsupported``."""
    version = _lacking(COALESCING_SINCE)
    needs = f"engine.coalesce_grad_reduction() needs DeepSpeed {COALESCING_SINCE} or later, found {version}"

    def refuse() -> None:
        raise Unsupported(f"{needs}.\n{_INSTALL_NEWEST}, or remove the call.")

    if version:
        engine.coalesce_grad_reduction = refuse


def refuse_rules_without_effect(config: Config, model: torch.nn.Module, trained: Sequence[str]) -> None:
    """Raise ``ConfigError`` if a rule by name has no effect on ``model``, whose ``trained`` parameters have states."""
    names: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if names.setdefault(param, name) != name:
            aliases[name] = names[param]
    config.check_names(trained, set(names.values()).difference(trained), aliases)


def _since(release: str, key: str, uses: Callable[[Any], bool]) -> Rule:
    """Return the rule that a block of which ``uses`` is true needs this release: an older one fails or ignores it."""
    return Rule(
        key,
        f"needs DeepSpeed {release} or later with ZeRO-3 and offloading",
        f"{_INSTALL_NEWEST}, or remove the key.",
        lambda config: uses(param_dict(config).get(key)) and _lacking(release),
    )


def _lacking(release: str) -> str:
    version: str = deepspeed.__version__
    return "" if is_at_least(version, release) else version


def _number(block: Any, key: str) -> float:
    value = block.get(key) if isinstance(block, dict) else None
    return value if isinstance(value, int | float) else 0


_LATER_FEATURES = (
    _since("0.19.5", "managed_gradient_accumulation", lambda value: value is False),
    _since("0.19.4", "tensor_parallel", lambda block: _number(block, "autotp_size") > 1),
    _since("0.19.3", "expert_parallel", lambda block: _number(block, "enabled") > 0),
)


def _device(offload_config: Any) -> str:
    return "none" if offload_config is None else OffloadDeviceEnum(offload_config.device).value


_STAGE = (
    Rule(
        "zero_optimization.stage",
        "must be 3",
        f'Interleaved offloading works on the sub-groups of ZeRO-3: set "stage": 3, or "enabled": false in '
        f'"{CONFIG_KEY}".',
        attrgetter("zero_optimization_stage"),
        (3,),
    ),
    Rule(
        "zero_optimization.offload_optimizer.device",
        'must be "cpu" or "nvme"',
        'Set "offload_optimizer": {"device": "cpu"}.',
        lambda config: _device(config.zero_config.offload_optimizer),
        ("cpu", "nvme"),
    ),
)


def _on_nvme(config: Any) -> bool:
    return _device(config.zero_config.offload_optimizer) == "nvme"


_QUANTISED = "Quantised ZeRO++ has not been tested to be bit-identical with interleaved offloading: remove it."


def _off(key: str, remedy: str, must: str = "must be false") -> Rule:
    """Return the rule that a dotted key of the DeepSpeed config is false or absent."""
    block, _, path = key.partition(".")
    attribute = {"bf16": "bfloat16", "fp16": "float16", "zero_optimization": "zero"}.get(block, block)
    return Rule(key, must, remedy, partial(_value, path=f"{attribute}_config.{path}"))


def _value(config: Any, path: str) -> Any:
    """Return the value at the dotted ``path``, or None if this release of DeepSpeed does not have it."""
    return reduce(lambda value, name: getattr(value, name, None), path.split("."), config)


_CONFIG = (
    Rule(
        "zero_optimization.offload_optimizer.ratio",
        "must be 1 (all optimizer states in host memory)",
        f'Twin-Flow splits them permanently: remove "ratio". "placement" in "{CONFIG_KEY}" places them by unit.',
        attrgetter("zero_config.offload_optimizer.ratio"),
        (1,),
    ),
    _off(
        "zero_optimization.offload_optimizer.super_offload",
        'SuperOffload replaces the update that the plugin schedules: remove "super_offload".',
    ),
    _off(
        "zero_optimization.zenflow",
        "ZenFlow updates with stale gradients, which cannot give the same bits as stock DeepSpeed. Remove it.",
        "must be absent",
    ),
    Rule(
        "zero_optimization.offload_param.device",
        'must be "none" or "cpu"',
        'Keep parameters on the accelerator or in host memory: set "device": "cpu" or remove "offload_param".',
        lambda config: _device(config.zero_config.offload_param),
        ("none", "cpu"),
    ),
    _off(
        "compile.deepcompile",
        'DeepCompile schedules the optimizer states in its own graph passes: remove "deepcompile".',
    ),
    Rule(
        "bf16.bf16_master_weights_and_grads",
        'needs "enabled": true in the block "bf16"',
        "Set that, or remove the key: the master weights and the model must both be bf16.",
        lambda config: has_bf16_masters(config) and not config.bfloat16_config.enabled,
    ),
    Rule(
        "data_types.grad_accum_dtype",
        "must not be fp16 with bf16_master_weights_and_grads",
        "The kernels have no fp16 gradients of bf16 masters: remove the key, or use bf16 or fp32.",
        lambda config: config.grad_accum_dtype if has_bf16_masters(config) else None,
        (None, "bf16", "bfloat16", "fp32", "float32", "float"),
    ),
    Rule(
        "zero_optimization.offload_optimizer.nvme_path",
        'is needed with "device": "nvme"',
        "Set it to a folder on a local disk.",
        lambda config: "nothing" if _on_nvme(config) and not config.zero_config.offload_optimizer.nvme_path else None,
    ),
    Rule(
        "bf16.bf16_optimizer_states",
        'must be true with bf16_master_weights_and_grads and "device": "nvme"',
        "DeepSpeed's load would convert fp32 moments to bf16, whose places in the file are others. Set it, or use "
        '"device": "cpu".',
        lambda config: (
            "false"
            if _on_nvme(config) and has_bf16_masters(config) and not config.bfloat16_config.bf16_optimizer_states
            else None
        ),
    ),
    _off(
        "fp16.fp16_master_weights_and_grads",
        "The plugin keeps the states of an fp16 model in fp32, as stock DeepSpeed does by default: remove it.",
    ),
    Rule(
        "torch_autocast.dtype",
        "must not be float16",
        "The gradient scaler of autocast calls the optimizer's step() itself: use bfloat16, or fp16 "
        "through DeepSpeed's own fp16 block.",
        lambda config: (
            torch.float16 if config.torch_autocast_enabled and config.torch_autocast_dtype is torch.float16 else None
        ),
    ),
    Rule(
        "optimizer.type",
        'must be "Adam" or "AdamW", or absent',
        'Set "optimizer": {"type": "AdamW", ...}, or pass deepspeed.ops.adam.DeepSpeedCPUAdam to initialize().',
        attrgetter("optimizer_name"),
        (None, "adam", "adamw"),
    ),
    _off("zero_optimization.zero_quantized_weights", _QUANTISED),
    _off("zero_optimization.zero_quantized_nontrainable_weights", _QUANTISED),
    _off("zero_optimization.zero_quantized_gradients", _QUANTISED),
    Rule(
        # Before a step, DeepSpeed 0.19.8 waits for DataStates only if it finds a commit_info, but it never finds one.
        "datastates_ckpt",
        "must be absent",
        "DataStates reads the states while the next update writes to them, and DeepSpeed does not wait for it: "
        "remove it. DeepSpeed's decoupled writer also saves in the background, but DeepSpeed 0.19.8 loads its "
        "checkpoints only with a config without `checkpoint.writer`.",
        lambda config: config.datastates_config.config if _value(config, "datastates_config.enabled") else None,
    ),
)

_OPTIMIZER = (
    Rule(
        "optimizer",
        "must be DeepSpeedCPUAdam, which DeepSpeed creates for Adam and AdamW when it offloads",
        f'Remove "zero_force_ds_cpu_optimizer": false, if the config contains it. {CONVERSION} '
        'Without Accelerate and the Trainer, set "optimizer": {"type": "AdamW", ...} without "torch_adam", or pass '
        "deepspeed.ops.adam.DeepSpeedCPUAdam to initialize().",
        lambda optimizer: f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        (f"{DeepSpeedCPUAdam.__module__}.{DeepSpeedCPUAdam.__qualname__}",),
    ),
    Rule(
        "optimizer (step hooks)",
        "must be none",
        "The update does not run in the optimizer's step(), so the hooks would see no parameters: remove them.",
        num_step_hooks,
    ),
)


def _wrong(optimizer: Any, is_wrong: Mapping[str, Callable[[Any], bool]]) -> str:
    """Return every hyperparameter for whose value ``is_wrong``, formatted as ``eps=None in param group 0``."""
    return ", ".join(
        f"{name}={group[name]!r} in param group {index}"
        for index, group in enumerate(optimizer.param_groups)
        for name, is_wrong_value in is_wrong.items()
        if is_wrong_value(group.get(name))
    )


def _is_no_number(value: Any) -> bool:
    return not isinstance(value, Real)


def _is_no_pair(betas: Any) -> bool:
    return not isinstance(betas, Sequence) or len(betas) != 2 or any(map(_is_no_number, betas))


_HYPERPARAMETERS = (
    Rule(
        "optimizer (hyperparameters)",
        "lr, eps and weight_decay must be numbers, and betas two numbers, in every param group",
        'Give Python numbers, or set "optimizer": {"type": "AdamW", ...}. Accelerate and Trainer replace even an '
        'optimizer that is not Adam by DeepSpeedCPUAdam, but keep its hyperparameters: choose "adamw_torch".',
        # DeepSpeedCPUAdam converts numbers only when it updates, too late to refuse them. PyTorch's schedulers would
        # write the next learning rate into a tensor while the update still runs.
        partial(_wrong, is_wrong={**dict.fromkeys(("lr", "eps", "weight_decay"), _is_no_number), "betas": _is_no_pair}),
    ),
    Rule(
        "optimizer (variants of Adam)",
        "amsgrad and maximize must be false",
        "DeepSpeedCPUAdam does not implement them, and stock DeepSpeed ignores them silently: remove it.",
        partial(_wrong, is_wrong={"amsgrad": bool, "maximize": bool}),
    ),
)
