"""Enable the plugin together with each unsupported setting, and report the errors.

With two ranks, one of them has an optimizer that is refused.
"""

from __future__ import annotations

import copy
import gc
import os
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import deepspeed
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam

from deep_opt_states import waiting
from deep_opt_states.config import ConfigError
from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.zero import plugin
from deep_opt_states.zero.internals.agreement import RanksDisagree
from deep_opt_states.zero.stage3 import DeepOptimizerStates_Stage3
from deep_opt_states.zero.start import devices, refusals
from deep_opt_states.zero.start.unsupported import Unsupported
from tests.launch import answer
from tests.zero.process_group import process_group

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 10},
    "deep_optimizer_states": {"placement": "stride", "update_stride": 2},
}


class NamedAccelerator(NamedTuple):
    name: str

    def device_name(self) -> str:
        return self.name


def config_with(changes: dict[str, Any]) -> dict[str, Any]:
    """Return ``BASE`` with values replaced by dotted key; ``None`` removes a key."""
    config = copy.deepcopy(BASE)
    for dotted, value in changes.items():
        *path, last = dotted.split(".")
        inner = config
        for key in path:
            inner = inner.setdefault(key, {})
        if value is None:
            inner.pop(last)
        else:
            inner[last] = value
    return config


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def low_precision_moments(params: Any) -> torch.optim.Optimizer:
    return DeepSpeedCPUAdam(params, fp32_optimizer_states=False)


def on_disk(path: str) -> dict[str, Any]:
    block = "zero_optimization.offload_optimizer"
    return {f"{block}.device": "nvme", f"{block}.nvme_path": path}


def gpu_accelerator() -> devices.AcceleratorChoice:
    """Return a device on which the CPU kernel cannot update a slot, as on CUDA."""
    return devices.AcceleratorChoice(HostDevice(), slots_on_host=False)


def adam_with_step_hook(params: Any) -> torch.optim.Optimizer:
    optimizer = DeepSpeedCPUAdam(params)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def second_group(**hyperparameters: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a function that makes an Adam, then sets ``hyperparameters`` of its second group, unseen by its checks."""

    def make(params: Any) -> torch.optim.Optimizer:
        first, second = params
        optimizer = DeepSpeedCPUAdam([{"params": [first]}, {"params": [second]}])
        optimizer.param_groups[1].update(hyperparameters)
        return optimizer

    return make


NO_OPTIMIZER = {"optimizer": None}
CLIENT = {"optimizer": None, "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
FP16 = {"bf16": None, "fp16.enabled": True}

ATTEMPTS: dict[str, tuple[dict[str, Any], dict[str, Any], AbstractContextManager[Any]]] = {
    "stage 0": ({"zero_optimization.stage": 0, "zero_optimization.offload_optimizer": None}, {}, nullcontext()),
    "no zero_optimization": ({"zero_optimization": None}, {}, nullcontext()),
    "stage 1": ({"zero_optimization.stage": 1}, {}, nullcontext()),
    "stage 2": ({"zero_optimization.stage": 2}, {}, nullcontext()),
    "no offload_optimizer": ({"zero_optimization.offload_optimizer": None}, {}, nullcontext()),
    "offload_optimizer none": ({"zero_optimization.offload_optimizer.device": "none"}, {}, nullcontext()),
    "nvme without a path": ({"zero_optimization.offload_optimizer.device": "nvme"}, {}, nullcontext()),
    "nvme without a folder": (on_disk("/no/such/folder"), {}, nullcontext()),
    "nvme in a folder of another user": (on_disk("/tmp"), {}, mock.patch.object(os, "access", return_value=False)),
    "nvme with fp32 moments of bf16 masters": (
        {**on_disk("/tmp"), "bf16.bf16_master_weights_and_grads": True},
        {},
        nullcontext(),
    ),
    "host memory without nvme": (
        {"deep_optimizer_states.host_memory_gb": 5.0},
        {},
        nullcontext(),
    ),
    "nvme parameters": (
        {"zero_optimization.offload_param.device": "nvme", "zero_optimization.offload_param.nvme_path": "/tmp"},
        {},
        nullcontext(),
    ),
    "ratio": ({"zero_optimization.offload_optimizer.ratio": 0.5}, {}, nullcontext()),
    "super_offload": ({"zero_optimization.offload_optimizer.super_offload": True}, {}, nullcontext()),
    "zenflow": (
        {"zero_optimization.zenflow": {"topk_ratio": 0.1, "select_interval": 2, "update_interval": 2}},
        {},
        nullcontext(),
    ),
    "deepcompile": ({"compile.deepcompile": True}, {}, nullcontext()),
    "bf16 master weights": ({"bf16.bf16_master_weights_and_grads": True}, {}, nullcontext()),
    "bf16 optimizer states": (
        {"bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True},
        {},
        nullcontext(),
    ),
    "bf16 masters of an fp16 model": ({**FP16, "bf16.bf16_master_weights_and_grads": True}, {}, nullcontext()),
    "fp16 master weights": ({**FP16, "fp16.fp16_master_weights_and_grads": True}, {}, nullcontext()),
    "fp16 autocast": (
        {"bf16": None, "torch_autocast": {"enabled": True, "dtype": "float16"}},
        {},
        nullcontext(),
    ),
    "muon": ({"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}, {}, nullcontext()),
    "torch adam": (
        {"optimizer.params.torch_adam": True, "zero_force_ds_cpu_optimizer": False},
        {},
        nullcontext(),
    ),
    "sgd": (CLIENT, {"optimizer": sgd}, nullcontext()),
    "moments in the dtype of fp32 masters": ({"optimizer": None}, {"optimizer": low_precision_moments}, nullcontext()),
    "deepspeed 0.17.5": ({}, {}, mock.patch.object(deepspeed, "__version__", "0.17.5")),
    "caller accumulates with 0.19.4": (
        {"managed_gradient_accumulation": False},
        {},
        mock.patch.object(deepspeed, "__version__", "0.19.4"),
    ),
    "AutoTP with 0.18.5": (
        {"tensor_parallel": {"autotp_size": 2}},
        {},
        mock.patch.object(deepspeed, "__version__", "0.18.5"),
    ),
    "AutoEP with 0.18.5": (
        {"expert_parallel": {"enabled": True}},
        {},
        mock.patch.object(deepspeed, "__version__", "0.18.5"),
    ),
    "another accelerator": (
        {},
        {},
        mock.patch.object(devices, "get_accelerator", return_value=NamedAccelerator("xpu")),
    ),
    "streamed on a GPU": (
        {"zero_optimization.stage3_param_persistence_threshold": 0},
        {},
        mock.patch.object(plugin, "choose_device", gpu_accelerator),
    ),
    "step hooks": ({"optimizer": None}, {"optimizer": adam_with_step_hook}, nullcontext()),
    "quantised gradients": ({"zero_optimization.zero_quantized_gradients": True}, {}, nullcontext()),
    "datastates": ({"datastates_ckpt": {}}, {}, nullcontext()),
    "stage 0, client optimizer": (
        {**NO_OPTIMIZER, "zero_optimization.stage": 0, "zero_optimization.offload_optimizer": None},
        {"optimizer": second_group()},
        nullcontext(),
    ),
    "no offload_optimizer, client optimizer": (
        {**NO_OPTIMIZER, "zero_optimization.offload_optimizer": None},
        {"optimizer": second_group()},
        nullcontext(),
    ),
    "no learning rate": (NO_OPTIMIZER, {"optimizer": second_group(lr=None)}, nullcontext()),
    "learning rate in a tensor": (NO_OPTIMIZER, {"optimizer": second_group(lr=torch.tensor(1e-3))}, nullcontext()),
    "eps of adafactor": (NO_OPTIMIZER, {"optimizer": second_group(eps=(1e-30, 1e-3))}, nullcontext()),
    "weight decay as a string": (NO_OPTIMIZER, {"optimizer": second_group(weight_decay="0.1")}, nullcontext()),
    "three betas": (NO_OPTIMIZER, {"optimizer": second_group(betas=(0.9, 0.99, 0.999))}, nullcontext()),
    "one beta": (NO_OPTIMIZER, {"optimizer": second_group(betas=0.9)}, nullcontext()),
    "no beta": (NO_OPTIMIZER, {"optimizer": second_group(betas=(None, 0.999))}, nullcontext()),
    "amsgrad": (NO_OPTIMIZER, {"optimizer": second_group(amsgrad=True)}, nullcontext()),
    "maximize": (NO_OPTIMIZER, {"optimizer": second_group(maximize=True)}, nullcontext()),
    "numbers of other types": (
        NO_OPTIMIZER,
        {"optimizer": second_group(lr=np.float32(1e-3), betas=[0, np.float64(0.99)], weight_decay=1, eps=True)},
        nullcontext(),
    ),
    "keys of PyTorch's AdamW": (
        NO_OPTIMIZER,
        {"optimizer": second_group(maximize=False, foreach=None, fused=True, capturable=False)},
        nullcontext(),
    ),
    "no optimizer": (NO_OPTIMIZER, {}, nullcontext()),
    "no optimizer, no offload": ({**NO_OPTIMIZER, "zero_optimization.offload_optimizer": None}, {}, nullcontext()),
    "no optimizer, stage 0": (
        {**NO_OPTIMIZER, "zero_optimization.stage": 0, "zero_optimization.offload_optimizer": None},
        {},
        nullcontext(),
    ),
    "no optimizer, everything else refused": (
        {
            **NO_OPTIMIZER,
            "zero_optimization.offload_optimizer.ratio": 0.5,
            "zero_optimization.zero_quantized_gradients": True,
        },
        {},
        nullcontext(),
    ),
    "no optimizer, misspelled placement": (
        {**NO_OPTIMIZER, "deep_optimizer_states": {"placement": "gpu"}},
        {},
        nullcontext(),
    ),
}


def attempt(
    changes: dict[str, Any], arguments: dict[str, Any], patch: AbstractContextManager[Any]
) -> dict[str, str | bool]:
    model = torch.nn.Sequential(torch.nn.Linear(6, 5, bias=False), torch.nn.Linear(5, 4, bias=False))
    for param in model.parameters():
        param.use_muon = True
    try:
        with patch:
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=config_with(changes), **arguments
            )
        if engine.basic_optimizer is not None:
            engine.backward(engine(torch.ones(1, 6, dtype=torch.bfloat16)).sum())
            engine.step()
    except (Unsupported, ConfigError, RanksDisagree) as error:
        return {"type": type(error).__name__, "message": str(error), "untouched": is_untouched(model)}
    except Exception:  # noqa: BLE001 (the test shows the traceback)
        return {"type": "other", "message": traceback.format_exc()}
    return {"type": "accepted", "message": type(engine.optimizer).__name__}


def is_untouched(model: torch.nn.Module) -> bool:
    """Return whether DeepSpeed has neither partitioned nor converted ``model``."""
    return all(not hasattr(param, "ds_id") and param.dtype is torch.float32 for param in model.parameters())


def attempt_under_zero_init() -> dict[str, str | bool]:
    model = None
    try:
        with deepspeed.zero.Init(config_dict_or_path=config_with({"zero_optimization.offload_optimizer.ratio": 0.5})):
            model = torch.nn.Linear(6, 5)
    except Unsupported as error:
        return {"type": "Unsupported", "message": str(error), "untouched": model is None}
    return {"type": "accepted", "message": ""}


def attempt_to_call_later_method() -> dict[str, str | bool]:
    """Call a method of the engine as if this release of DeepSpeed lacked it."""
    model = torch.nn.Linear(6, 5)
    with mock.patch.dict(refusals._LATER_METHODS, coalesce_grad_reduction="0.20.0"):
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config_with({}))
    try:
        with engine.coalesce_grad_reduction():
            pass
    except Unsupported as error:
        return {"type": "Unsupported", "message": str(error), "untouched": is_untouched(model)}
    return {"type": "accepted", "message": ""}


def own_threads() -> int:
    """Return the number of threads but for those of waits, which end at once but not before their wait does."""
    return sum(thread.name != waiting.THREAD for thread in threading.enumerate())


def attempt_on_one_rank() -> None:
    """Refuse on rank 1 alone, print which engines and threads are left on both ranks, and train the next engine."""
    pattern = "lm_heads.*" if torch.distributed.get_rank() == 1 else "*"
    block = {"placement": [{"match": pattern, "states": "cpu"}]}
    answer(attempt({"deep_optimizer_states": block}, {}, nullcontext()))
    hyperparameters = {"lr": None} if torch.distributed.get_rank() == 1 else {}
    threads = own_threads()
    answer(attempt(NO_OPTIMIZER, {"optimizer": second_group(**hyperparameters)}, nullcontext()))
    gc.collect()
    left = [type(engine).__name__ for engine in gc.get_objects() if type(engine) is DeepOptimizerStates_Stage3]
    answer({"engines left": left, "threads left": own_threads() - threads})
    answer(attempt({}, {}, nullcontext()))


RULES_WITHOUT_EFFECT = {
    "matches nothing": [{"match": "lm_heads.*", "states": "resident"}],
    "shadowed": [{"match": "*", "states": "cpu"}, {"match": "*.weight", "states": "streamed"}],
    "a regular expression": [{"match": r".*\\.weight$", "states": "cpu"}],
    "only frozen": [{"match": "*.frozen", "states": "cpu"}],
}


class WithFrozen(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.layer.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)


def attempt_rules_without_effect() -> None:
    """Print the error for each list of rules, raised before DeepSpeed compiles or loads a kernel."""
    for name, rules in RULES_WITHOUT_EFFECT.items():
        model = WithFrozen()
        config = {**BASE, "deep_optimizer_states": {"placement": rules}}
        with mock.patch.object(DeepSpeedCPUAdam, "__init__", side_effect=AssertionError("a kernel was loaded")):
            try:
                deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
                error = "none"
            except ConfigError as refused:
                error = str(refused)
        answer({"name": f"rules: {name}", "error": error, "partitioned": hasattr(model.layer.weight, "ds_id")})


def attempt_rules_for_the_optimized_parameters() -> None:
    """Print the optimizer of an engine that trains one of two layers, with rules for that layer only."""
    model = torch.nn.ModuleDict({"trained": torch.nn.Linear(4, 4), "other": torch.nn.Linear(4, 4)})
    block = {"placement": [{"match": "trained.*", "states": "streamed"}]}
    config = {**BASE, "deep_optimizer_states": block}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model["trained"].parameters(), config=config)
    answer({"name": "rules: only for the optimized", "type": type(engine.optimizer).__name__})
    engine.destroy()


def main() -> None:
    if torch.distributed.get_world_size() == 2:
        attempt_on_one_rank()
        return
    get_accelerator().is_fp16_supported = lambda: True
    for name, arguments in ATTEMPTS.items():
        answer({"name": name, **attempt(*arguments)})
    attempt_rules_without_effect()
    attempt_rules_for_the_optimized_parameters()
    answer({"name": "under zero.Init", **attempt_under_zero_init()})
    answer({"name": "method of a later release", **attempt_to_call_later_method()})


if __name__ == "__main__":
    with process_group():
        main()
