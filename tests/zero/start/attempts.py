"""List attempts to train with settings of which most are unsupported: changes of a config, arguments, and patches."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
