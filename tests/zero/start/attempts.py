"""List attempts to train with settings of which most are unsupported, and the errors that refuse them."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import deepspeed
import numpy as np
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.zero import plugin
from deep_opt_states.zero.start import devices

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


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """An attempt to train: changes of ``BASE``, an optimizer of the script and a patch.

    It is refused with an error that contains the rule with the value found, and the remedy; or it is accepted, with an
    optimizer of this class. An attempt that ``converts`` is refused when DeepSpeed makes the optimizer: it has
    converted the model, but made no states yet.
    """

    changes: dict[str, Any]
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    patch: AbstractContextManager[Any] = field(default_factory=nullcontext)
    rule: str = ""
    remedy: str = ""
    converts: bool = False
    accepted_with: str = ""


def refused(changes: dict[str, Any], rule: str, remedy: str, **others: Any) -> Attempt:
    return Attempt(changes=changes, rule=rule, remedy=remedy, **others)


def accepted(changes: dict[str, Any], accepted_with: str, **others: Any) -> Attempt:
    return Attempt(changes=changes, accepted_with=accepted_with, **others)


PLUGIN = "DeepOptimizerStates_Stage3"
STAGE_0: dict[str, Any] = {"zero_optimization.stage": 0, "zero_optimization.offload_optimizer": None}
NUMBERS = "Give Python numbers"

REFUSED: dict[str, Attempt] = {
    "stage 0": refused(STAGE_0, "zero_optimization.stage: must be 3, found 0", 'set "stage": 3'),
    "no zero_optimization": refused(
        {"zero_optimization": None}, "zero_optimization.stage: must be 3, found 0", 'set "stage": 3'
    ),
    "stage 1": refused({"zero_optimization.stage": 1}, "zero_optimization.stage: must be 3, found 1", 'set "stage": 3'),
    "stage 2": refused({"zero_optimization.stage": 2}, "zero_optimization.stage: must be 3, found 2", 'set "stage": 3'),
    "no offload_optimizer": refused(
        {"zero_optimization.offload_optimizer": None},
        'offload_optimizer.device: must be "cpu" or "nvme", found none',
        'Set "offload_optimizer"',
    ),
    "offload_optimizer none": refused(
        {"zero_optimization.offload_optimizer.device": "none"},
        'offload_optimizer.device: must be "cpu" or "nvme", found none',
        'Set "offload_optimizer"',
    ),
    "nvme without a path": refused(
        {"zero_optimization.offload_optimizer.device": "nvme"},
        'nvme_path: is needed with "device": "nvme", found nothing',
        "Set it to a folder",
    ),
    "nvme without a folder": refused(
        on_disk("/no/such/folder"), "nvme_path: must be a folder, found none at /no/such/folder", "Create it"
    ),
    "nvme in a folder of another user": refused(
        on_disk("/tmp"),
        "nvme_path: must be writable by this user",
        "Name a folder of yours",
        patch=mock.patch.object(os, "access", return_value=False),
    ),
    "nvme with fp32 moments of bf16 masters": refused(
        {**on_disk("/tmp"), "bf16.bf16_master_weights_and_grads": True},
        "bf16.bf16_optimizer_states: must be true with",
        "Set it, or use",
    ),
    "host memory without nvme": refused(
        {"deep_optimizer_states.host_memory_gb": 5.0}, 'host_memory_gb: belongs to "device": "nvme"', "Remove the key"
    ),
    "nvme parameters": refused(
        {"zero_optimization.offload_param.device": "nvme", "zero_optimization.offload_param.nvme_path": "/tmp"},
        'offload_param.device: must be "none" or "cpu", found nvme',
        'set "device": "cpu"',
    ),
    "ratio": refused(
        {"zero_optimization.offload_optimizer.ratio": 0.5}, "offload_optimizer.ratio: must be 1", 'remove "ratio"'
    ),
    "super_offload": refused(
        {"zero_optimization.offload_optimizer.super_offload": True},
        "offload_optimizer.super_offload: must be false, found True",
        'remove "super_offload"',
    ),
    "zenflow": refused(
        {"zero_optimization.zenflow": {"topk_ratio": 0.1, "select_interval": 2, "update_interval": 2}},
        "zero_optimization.zenflow: must be absent, found topk_ratio=0.1",
        "Remove it",
    ),
    "deepcompile": refused(
        {"compile.deepcompile": True}, "compile.deepcompile: must be false, found True", 'remove "deepcompile"'
    ),
    "bf16 masters of an fp16 model": refused(
        {**FP16, "bf16.bf16_master_weights_and_grads": True},
        'bf16.bf16_master_weights_and_grads: needs "enabled": true in the block "bf16", found True',
        "or remove the key",
    ),
    "fp16 master weights": refused(
        {**FP16, "fp16.fp16_master_weights_and_grads": True},
        "fp16.fp16_master_weights_and_grads: must be false, found True",
        "remove it",
    ),
    "fp16 autocast": refused(
        {"bf16": None, "torch_autocast": {"enabled": True, "dtype": "float16"}},
        "torch_autocast.dtype: must not be float16, found torch.float16",
        "use bfloat16",
    ),
    "muon": refused(
        {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}},
        'optimizer.type: must be "Adam" or "AdamW", or absent, found muon',
        '"type": "AdamW"',
    ),
    "torch adam": refused(
        {"optimizer.params.torch_adam": True, "zero_force_ds_cpu_optimizer": False},
        "optimizer: must be DeepSpeedCPUAdam",
        "pass deepspeed.ops.adam.DeepSpeedCPUAdam",
        converts=True,
    ),
    "sgd": refused(
        CLIENT,
        "found torch.optim.sgd.SGD.\nRemove",
        'Remove "zero_force_ds_cpu_optimizer": false, if the config contains it. Use "adamw_torch"',
        optimizer=sgd,
        converts=True,
    ),
    "deepspeed 0.17.5": refused(
        {},
        "must be version 0.17.6 or later",
        "pip install deepspeed==0.19.8",
        patch=mock.patch.object(deepspeed, "__version__", "0.17.5"),
    ),
    "caller accumulates with 0.19.4": refused(
        {"managed_gradient_accumulation": False},
        "managed_gradient_accumulation: needs DeepSpeed 0.19.5 or later with ZeRO-3 and offloading, found 0.19.4",
        "or remove the key",
        patch=mock.patch.object(deepspeed, "__version__", "0.19.4"),
    ),
    "AutoTP with 0.18.5": refused(
        {"tensor_parallel": {"autotp_size": 2}},
        "tensor_parallel: needs DeepSpeed 0.19.4 or later",
        "or remove the key",
        patch=mock.patch.object(deepspeed, "__version__", "0.18.5"),
    ),
    "AutoEP with 0.18.5": refused(
        {"expert_parallel": {"enabled": True}},
        "expert_parallel: needs DeepSpeed 0.19.3 or later",
        "or remove the key",
        patch=mock.patch.object(deepspeed, "__version__", "0.18.5"),
    ),
    "another accelerator": refused(
        {},
        'must be "cuda" or "cpu", found \'xpu\'',
        '"enabled": false',
        patch=mock.patch.object(devices, "get_accelerator", return_value=NamedAccelerator("xpu")),
        converts=True,
    ),
    "streamed on a GPU": refused(
        {"zero_optimization.stage3_param_persistence_threshold": 0},
        "placement: streamed and resident units need a GPU Adam kernel",
        '"placement": "cpu"',
        patch=mock.patch.object(plugin, "choose_device", gpu_accelerator),
        converts=True,
    ),
    "step hooks": refused(
        {"optimizer": None},
        "optimizer (step hooks): must be none, found 1",
        "remove them",
        optimizer=adam_with_step_hook,
        converts=True,
    ),
    "quantised gradients": refused(
        {"zero_optimization.zero_quantized_gradients": True},
        "zero_quantized_gradients: must be false, found True",
        "remove it",
    ),
    "datastates": refused(
        {"datastates_ckpt": {}}, "datastates_ckpt: must be absent, found {}", "decoupled writer saves in the background"
    ),
    "stage 0, client optimizer": refused(
        {**NO_OPTIMIZER, **STAGE_0},
        "zero_optimization.stage: must be 3, found 0",
        'set "stage": 3',
        optimizer=second_group(),
    ),
    "no offload_optimizer, client optimizer": refused(
        {**NO_OPTIMIZER, "zero_optimization.offload_optimizer": None},
        'offload_optimizer.device: must be "cpu" or "nvme", found none',
        'Set "offload_optimizer"',
        optimizer=second_group(),
    ),
    "no optimizer, misspelled placement": refused(
        {**NO_OPTIMIZER, "deep_optimizer_states": {"placement": "gpu"}},
        'placement: must be "planned"',
        'Did you mean [{"match": "*", "states": "resident"}]',
    ),
}

HYPERPARAMETERS: list[tuple[dict[str, Any], str, str]] = [
    ({"lr": None}, "must be numbers, and betas two numbers, in every param group, found lr=None", NUMBERS),
    ({"lr": torch.tensor(1e-3)}, "found lr=tensor(0.0010)", NUMBERS),
    ({"eps": (1e-30, 1e-3)}, "found eps=(1e-30, 0.001)", 'choose "adamw_torch"'),
    ({"weight_decay": "0.1"}, "found weight_decay='0.1'", NUMBERS),
    ({"betas": (0.9, 0.99, 0.999)}, "found betas=(0.9, 0.99, 0.999)", NUMBERS),
    ({"betas": 0.9}, "found betas=0.9", NUMBERS),
    ({"betas": (None, 0.999)}, "found betas=(None, 0.999)", NUMBERS),
    ({"amsgrad": True}, "amsgrad and maximize must be false, found amsgrad=True", "remove it"),
    ({"maximize": True}, "amsgrad and maximize must be false, found maximize=True", "remove it"),
]
"""Hyperparameters of the second param group, the rule with the value found, and the remedy."""

REFUSED |= {
    str(hyperparameters): refused(
        NO_OPTIMIZER, f"{rule} in param group 1", remedy, optimizer=second_group(**hyperparameters), converts=True
    )
    for hyperparameters, rule, remedy in HYPERPARAMETERS
}

ACCEPTED: dict[str, Attempt] = {
    "bf16 master weights": accepted({"bf16.bf16_master_weights_and_grads": True}, PLUGIN),
    "bf16 optimizer states": accepted(
        {"bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True}, PLUGIN
    ),
    "moments in the dtype of fp32 masters": accepted({"optimizer": None}, PLUGIN, optimizer=low_precision_moments),
    "numbers of other types": accepted(
        NO_OPTIMIZER,
        PLUGIN,
        optimizer=second_group(lr=np.float32(1e-3), betas=[0, np.float64(0.99)], weight_decay=1, eps=True),
    ),
    "keys of PyTorch's AdamW": accepted(
        NO_OPTIMIZER, PLUGIN, optimizer=second_group(maximize=False, foreach=None, fused=True, capturable=False)
    ),
    "no optimizer": accepted(NO_OPTIMIZER, "DeepSpeedZeRoOffload"),
    "no optimizer, no offload": accepted(
        {**NO_OPTIMIZER, "zero_optimization.offload_optimizer": None}, "DeepSpeedZeRoOffload"
    ),
    "no optimizer, stage 0": accepted({**NO_OPTIMIZER, **STAGE_0}, "BF16_Optimizer"),
    "no optimizer, everything else refused": accepted(
        {
            **NO_OPTIMIZER,
            "zero_optimization.offload_optimizer.ratio": 0.5,
            "zero_optimization.zero_quantized_gradients": True,
        },
        "DeepSpeedZeRoOffload",
    ),
}
