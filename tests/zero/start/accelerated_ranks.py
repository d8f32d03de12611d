"""Train with the optimizers that Accelerate replaces, and with configs that the refusal of ZeRO-2 prints."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import deepspeed
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs

from deep_opt_states import log
from deep_opt_states.zero.start.unsupported import Unsupported
from tests.launch import answer
from tests.zero.process_group import process_group
from tests.zero.start.older_stage_configs import CONFIGS

BLOCK = {"deep_optimizer_states": {"placement": "cpu"}}
STAGE_3: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}
FILLED_IN = {"lr": 1e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.0}

OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-3),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-3),
}


def main() -> None:
    for name, make in OPTIMIZERS.items():
        lines: list[str] = []
        with mock.patch.object(log, "warn", lines.append):
            answer({"name": name, "optimizer": _prepared(make, {**STAGE_3, **BLOCK}), "lines": lines})
    for size in (0, 1):
        zero = {**STAGE_3["zero_optimization"], "sub_group_size": size}
        lines = []
        with mock.patch.object(log, "warn", lines.append):
            optimizer = _prepared(OPTIMIZERS["AdamW"], {**STAGE_3, **BLOCK, "zero_optimization": zero})
        answer({"name": f"sub_group_size {size}", "optimizer": optimizer, "lines": lines})
    for name, config in CONFIGS.items():
        answer({"name": name, "optimizer": _trained_as_stage_3(_filled_in({**config, **BLOCK}))})


def _prepared(make: Any, config: dict[str, Any]) -> str:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    model = torch.nn.Linear(8, 8)
    engine, _ = accelerator.prepare(model, make(model.parameters()))
    return type(engine.optimizer).__name__


def _trained_as_stage_3(config: dict[str, Any]) -> str:
    """Train with the config that the error contains, and return the class of the optimizer."""
    try:
        deepspeed.initialize(model=torch.nn.Linear(8, 8), config=config)
    except Unsupported as error:
        printed = json.loads(str(error).rpartition("\n\n")[2])
    model = torch.nn.Linear(8, 8)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=printed)
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 8, dtype=next(model.parameters()).dtype)).sum())
        engine.step()
    return type(engine.optimizer).__name__


def _filled_in(config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` without what the Trainer fills in, and with an optimizer."""
    known = {key: value for key, value in config.items() if value != "auto" and key not in ("scheduler", "fp16")}
    optimizer = {"type": "AdamW", "params": FILLED_IN}
    return {**known, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "optimizer": optimizer}


if __name__ == "__main__":
    with process_group():
        main()
