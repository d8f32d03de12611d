"""Check that unsupported settings are refused at start, with the rule, the value found and the remedy."""

from __future__ import annotations

import copy
import errno
import gc
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from io import StringIO
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import deepspeed
import numpy as np
import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from deep_opt_states import waiting
from deep_opt_states.config import ConfigError, Unsupported
from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.names import SWITCH
from deep_opt_states.zero import plugin
from deep_opt_states.zero.internals.agreement import RanksDisagree
from deep_opt_states.zero.stage3 import DeepOptimizerStates_Stage3
from deep_opt_states.zero.start import devices, refusals
from tests.ranks import ranks

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 10},
    "deep_optimizer_states": {"placement": "stride", "update_stride": 2},
}


def config_with(changes: dict[str, Any]) -> dict[str, Any]:
    """Return ``BASE`` with values replaced by dotted key; ``None`` removes a key."""
    config = copy.deepcopy(BASE)
    for dotted, value in changes.items():
        *path, last = dotted.split(".")
        inner = config
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = value
        if value is None:
            inner.pop(last)
    return config


def adam_with_step_hook(params: Any) -> torch.optim.Optimizer:
    optimizer = DeepSpeedCPUAdam(params)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def second_group(**hyperparameters: Any) -> Callable[[Any], torch.optim.Optimizer]:
    def make(params: Any) -> torch.optim.Optimizer:
        optimizer = DeepSpeedCPUAdam([{"params": [param]} for param in params])
        optimizer.param_groups[1].update(hyperparameters)
        return optimizer

    return make


class Attempt(NamedTuple):
    """An attempt to train: changes of ``BASE``, an optimizer of the script and a patch.

    It is refused with an error that contains the rule with the value found, and the remedy. An attempt that
    ``converts`` is refused when DeepSpeed makes the optimizer: it has converted the model, but made no states yet.
    """

    changes: dict[str, Any]
    rule: str = ""
    remedy: str = ""
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    patch: AbstractContextManager[Any] = nullcontext()
    converts: bool = False


ZERO, OFFLOAD = "zero_optimization.", "zero_optimization.offload_optimizer."
NVME: dict[str, Any] = {f"{OFFLOAD}device": "nvme", f"{OFFLOAD}nvme_path": "/tmp"}
NVME_PARAMETERS = {f"{ZERO}offload_param.device": "nvme", f"{ZERO}offload_param.nvme_path": "/tmp"}
FP16 = {"bf16": None, "fp16.enabled": True}
AUTOCAST = {"bf16": None, "torch_autocast": {"enabled": True, "dtype": "float16"}}
STAGE_0: dict[str, Any] = {f"{ZERO}stage": 0, f"{ZERO}offload_optimizer": None}
BF16_MASTERS = {"bf16.bf16_master_weights_and_grads": True}
ZENFLOW = {"topk_ratio": 0.1, "select_interval": 2, "update_interval": 2}
ALL_UNITS = {f"{ZERO}stage3_param_persistence_threshold": 0}
CLIENT: dict[str, Any] = {"optimizer": None}
TORCH_ADAM = {"optimizer.params.torch_adam": True, "zero_force_ds_cpu_optimizer": False}
SGD = {**CLIENT, "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
MISSPELLED = {**CLIENT, "deep_optimizer_states": {"placement": "gpu"}}

SETTINGS: list[tuple[dict[str, Any], str, str]] = [
    (STAGE_0, "zero_optimization.stage: must be 3, found 0", 'set "stage": 3'),
    ({f"{ZERO}offload_optimizer": None}, 'device: must be "cpu" or "nvme", found none', 'Set "offload_optimizer"'),
    ({f"{OFFLOAD}device": "nvme"}, 'nvme_path: is needed with "device": "nvme", found nothing', "Set it to a folder"),
    ({**NVME, f"{OFFLOAD}nvme_path": "/no"}, "can create files, found /no: No such file", "Create it"),
    ({**NVME, **BF16_MASTERS}, "bf16.bf16_optimizer_states: must be true with", "Set it, or use"),
    ({"deep_optimizer_states.host_memory_gb": 5.0}, 'host_memory_gb: belongs to "device": "nvme"', "Remove the key"),
    (NVME_PARAMETERS, 'offload_param.device: must be "none" or "cpu", found nvme', 'set "device": "cpu"'),
    ({f"{OFFLOAD}ratio": 0.5}, "offload_optimizer.ratio: must be 1", 'remove "ratio"'),
    ({f"{OFFLOAD}super_offload": True}, "super_offload: must be false, found True", 'remove "super_offload"'),
    ({f"{ZERO}zenflow": ZENFLOW}, "zero_optimization.zenflow: must be absent, found topk_ratio=0.1", "Remove it"),
    ({"compile.deepcompile": True}, "compile.deepcompile: must be false, found True", 'remove "deepcompile"'),
    ({**FP16, **BF16_MASTERS}, 'needs "enabled": true in the block "bf16", found True', "or remove the key"),
    ({**FP16, "fp16.fp16_master_weights_and_grads": True}, "must be false, found True", "remove it"),
    (AUTOCAST, "torch_autocast.dtype: must not be float16, found torch.float16", "use bfloat16"),
    ({"optimizer.type": "Muon"}, 'must be "Adam" or "AdamW", or absent, found muon', '"type": "AdamW"'),
    ({f"{ZERO}zero_quantized_gradients": True}, "zero_quantized_gradients: must be false, found True", "remove it"),
    ({"datastates_ckpt": {}}, "datastates_ckpt: must be absent, found {}", "decoupled writer"),
    (MISSPELLED, 'placement: must be "planned"', 'Did you mean [{"match": "*", "states": "resident"}]'),
]
"""Changes of the config, the rule with the value found, and the remedy."""

RELEASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("0.17.5", {}, "must be version 0.17.6 or later", "pip install deepspeed==0.19.8"),
    ("0.19.4", {"managed_gradient_accumulation": False}, "needs DeepSpeed 0.19.5 or later with", "remove the key"),
    ("0.18.5", {"tensor_parallel": {"autotp_size": 2}}, "needs DeepSpeed 0.19.4 or later", "remove the key"),
    ("0.18.5", {"expert_parallel": {"enabled": True}}, "needs DeepSpeed 0.19.3 or later", "remove the key"),
]
"""Releases of DeepSpeed that lack something, or everything, that the plugin needs."""

HYPERPARAMETERS: list[tuple[dict[str, Any], str, str]] = [
    ({"lr": None}, "must be numbers, and betas two numbers, in every param group, found lr=None", "Python numbers"),
    ({"lr": torch.tensor(1e-3)}, "found lr=tensor(0.0010)", "Give Python numbers"),
    ({"eps": (1e-30, 1e-3)}, "found eps=(1e-30, 0.001)", 'choose "adamw_torch"'),
    ({"betas": 0.9}, "found betas=0.9", "Give Python numbers"),
    ({"amsgrad": True}, "amsgrad and maximize must be false, found amsgrad=True", "remove it"),
    ({"maximize": True}, "amsgrad and maximize must be false, found maximize=True", "remove it"),
]
"""Hyperparameters of the second param group, the rule with the value found, and the remedy."""

OPTIMIZERS: list[tuple[dict[str, Any], str, str, Any]] = [
    (TORCH_ADAM, "optimizer: must be DeepSpeedCPUAdam", "pass deepspeed.ops.adam.DeepSpeedCPUAdam", None),
    (SGD, "found torch.optim.sgd.SGD.\nRemove", 'Use "adamw_torch"', lambda params: torch.optim.SGD(params, lr=0.1)),
    (CLIENT, "optimizer (step hooks): must be none, found 1", "remove them", adam_with_step_hook),
    *(
        (CLIENT, f"{rule} in param group 1", remedy, second_group(**hyperparameters))
        for hyperparameters, rule, remedy in HYPERPARAMETERS
    ),
]
XPU = SimpleNamespace(device_name=lambda: "xpu")
# As on CUDA, the CPU kernel cannot update a slot.
ON_GPU = devices.AcceleratorChoice(HostDevice(), slots_on_host=False)
NO_ACCESS = mock.patch.object(os, "open", side_effect=PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
ON_XPU = mock.patch.object(devices, "get_accelerator", return_value=XPU)
WITHOUT_KERNEL = mock.patch.object(plugin, "choose_device", return_value=ON_GPU)

REFUSED = [
    Attempt({**STAGE_0, **CLIENT}, *SETTINGS[0][1:], second_group()),
    Attempt(NVME, "can create files, found /tmp: Permission denied", "Name a folder of yours", patch=NO_ACCESS),
    Attempt({}, 'must be "cuda" or "cpu", found \'xpu\'', '"enabled": false', patch=ON_XPU, converts=True),
    Attempt(ALL_UNITS, "need a GPU Adam kernel", '"placement": "cpu"', patch=WITHOUT_KERNEL, converts=True),
    *(Attempt(*setting) for setting in SETTINGS),
    *(Attempt(*refused, patch=mock.patch.object(deepspeed, "__version__", version)) for version, *refused in RELEASES),
    *(Attempt(*refused, converts=True) for refused in OPTIMIZERS),
]

OF_OTHER_TYPES = {"lr": np.float32(1e-3), "betas": [0, np.float64(0.99)], "weight_decay": 1, "eps": True}
OF_PYTORCH = {"maximize": False, "foreach": None, "fused": True, "capturable": False}
OTHERS_REFUSED = {**CLIENT, f"{OFFLOAD}ratio": 0.5, f"{ZERO}zero_quantized_gradients": True}
PLUGIN = "DeepOptimizerStates_Stage3"

ACCEPTED = [
    (Attempt(BF16_MASTERS), PLUGIN),
    (Attempt({**BF16_MASTERS, "bf16.bf16_optimizer_states": True}), PLUGIN),
    (Attempt(CLIENT, optimizer=lambda params: DeepSpeedCPUAdam(params, fp32_optimizer_states=False)), PLUGIN),
    (Attempt(CLIENT, optimizer=second_group(**OF_OTHER_TYPES)), PLUGIN),
    (Attempt(CLIENT, optimizer=second_group(**OF_PYTORCH)), PLUGIN),
    # Without an optimizer, an engine is stock's.
    (Attempt({**STAGE_0, **CLIENT}), "BF16_Optimizer"),
    (Attempt(OTHERS_REFUSED), "DeepSpeedZeRoOffload"),
]
"""Attempts that are accepted, each with the class of the engine's optimizer."""


def outcome(attempt: Attempt) -> tuple[str, str, bool]:
    """Return the type and the message of the error, and whether the model is untouched, or the optimizer's class."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 5, bias=False), torch.nn.Linear(5, 4, bias=False))
    for param in model.parameters():
        param.use_muon = True
    arguments = {} if attempt.optimizer is None else {"optimizer": attempt.optimizer}
    try:
        with attempt.patch:
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=config_with(attempt.changes), **arguments
            )
    except (Unsupported, ConfigError, RanksDisagree) as error:
        # Otherwise DeepSpeed has partitioned or converted the model.
        untouched = all(not hasattr(param, "ds_id") and param.dtype is torch.float32 for param in model.parameters())
        return type(error).__name__, str(error), untouched
    if engine.basic_optimizer is not None:
        engine.backward(engine(torch.ones(1, 6, dtype=torch.bfloat16)).sum())
        engine.step()
    return "accepted", type(engine.optimizer).__name__, False


@pytest.mark.P6
@ranks(1)
def test_an_unsupported_feature_is_refused_with_rule_value_and_remedy_and_others_are_accepted() -> None:
    wrong = []
    for attempt in REFUSED:
        kind, message, untouched = outcome(attempt)
        named = all(part in message for part in (attempt.rule, "found", attempt.remedy))
        if kind not in ("Unsupported", "ConfigError") or not named or not (untouched or attempt.converts):
            wrong.append((attempt, kind, message))
    with redirect_stdout(StringIO()) as output:
        wrong += [(attempt, found) for attempt, expected in ACCEPTED if (found := outcome(attempt))[1] != expected]
    assert wrong == []
    assert output.getvalue().count("an engine without an optimizer runs as stock DeepSpeed") == 2


@pytest.mark.P6
@ranks(1)
def test_a_feature_is_refused_in_zero_init_before_the_model_is_made_and_a_method_when_it_is_called() -> None:
    model = None
    config = config_with({f"{OFFLOAD}ratio": 0.5})
    with pytest.raises(Unsupported, match="must be 1"), deepspeed.zero.Init(config_dict_or_path=config):
        model = torch.nn.Linear(6, 5)
    assert model is None
    model = torch.nn.Linear(6, 5)
    with mock.patch.object(refusals, "COALESCING_SINCE", "0.20.0"):
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config_with({}))
    with pytest.raises(Unsupported) as refused, engine.coalesce_grad_reduction():
        pass
    assert "engine.coalesce_grad_reduction() needs DeepSpeed 0.20.0 or later, found" in str(refused.value)
    assert "or remove the call" in str(refused.value)


RULES_WITHOUT_EFFECT = {
    "placement[0].match: must match a parameter of the model, found 'lm_heads.*'": ["lm_heads.*"],
    "placement[1].match: must match a parameter that no earlier rule matches": ["*", "*.weight"],
    "placement[0].match: must match a parameter that is trained": ["*.frozen"],
}
"""The message of the refusal, and the patterns of the rules."""


@ranks(1)
def test_a_rule_without_effect_is_refused_before_a_kernel_is_loaded() -> None:
    """Check also that rules for all parameters of the optimizer are accepted, though others require gradients."""
    for message, patterns in RULES_WITHOUT_EFFECT.items():
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        model[0].frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        placement = [{"match": pattern, "states": "cpu"} for pattern in patterns]
        config = config_with({"deep_optimizer_states": {"placement": placement}})
        no_kernel = mock.patch.object(DeepSpeedCPUAdam, "__init__", side_effect=AssertionError("a kernel was loaded"))
        with no_kernel, pytest.raises(ConfigError) as refused:
            deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        assert message in str(refused.value)
        assert not hasattr(model[0].weight, "ds_id")
    both = torch.nn.ModuleDict({"trained": torch.nn.Linear(4, 4), "other": torch.nn.Linear(4, 4)})
    config = config_with({"deep_optimizer_states": {"placement": [{"match": "trained.*", "states": "streamed"}]}})
    engine, *_ = deepspeed.initialize(model=both, model_parameters=both["trained"].parameters(), config=config)
    assert type(engine.optimizer).__name__ == PLUGIN


def own_threads() -> int:
    """Return the number of threads except waiting ones, which end immediately, but not before their wait does."""
    return sum(thread.name != waiting.THREAD for thread in threading.enumerate())


@pytest.mark.P6
@ranks(2)
def test_a_refusal_on_one_rank_leaves_no_engine_and_no_thread_on_any() -> None:
    """Refuse on rank 1 alone, and train with the next engine."""
    rank = torch.distributed.get_rank()
    block = {"placement": [{"match": ("*", "lm_heads.*")[rank], "states": "cpu"}]}
    kind, message, _ = outcome(Attempt({"deep_optimizer_states": block}))
    assert kind == ("RanksDisagree", "ConfigError")[rank]
    assert "placement[0].match: must match a parameter of the model" in message
    threads = own_threads()
    hyperparameters: dict[str, Any] = {"lr": None} if rank == 1 else {}
    kind, message, _ = outcome(Attempt(CLIENT, optimizer=second_group(**hyperparameters)))
    assert kind == ("RanksDisagree", "Unsupported")[rank]
    assert "found lr=None in param group 1" in message
    gc.collect()
    assert [type(engine) for engine in gc.get_objects() if type(engine) is DeepOptimizerStates_Stage3] == []
    assert own_threads() == threads
    assert outcome(Attempt({}))[:2] == ("accepted", PLUGIN)


@ranks(2)
@mock.patch.dict("os.environ", {SWITCH: "0"})
def test_rank_0_logs_once_that_the_plugin_is_switched_off_and_stock_trains() -> None:
    with redirect_stdout(StringIO()) as output:
        found = [outcome(Attempt({}))[:2] for _ in range(2)]
    assert found == [("accepted", "DeepSpeedZeroOptimizer_Stage3")] * 2
    assert output.getvalue().count(f"switched off by {SWITCH}=0") == (torch.distributed.get_rank() == 0)
