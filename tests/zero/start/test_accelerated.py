"""Check the warnings that depend on Accelerate, and the configs for ZeRO-3 that are printed instead of ZeRO-2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from deep_opt_states import log
from deep_opt_states.cli.config_check import examine_config
from deep_opt_states.config import ConfigError
from deep_opt_states.doctor import Status
from deep_opt_states.zero.start.older_stages import NOT_IN_STAGE_3, as_stage_3
from deep_opt_states.zero.start.unsupported import Unsupported
from tests.ranks import ranks
from tests.software_gpu.published_configs.published import AXOLOTL
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


PLUGIN = "DeepOptimizerStates_Stage3"
EMPTY: dict[str, Any] = {"deep_optimizer_states": {}}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the lines that are logged while a config is read."""
    lines: list[str] = []
    monkeypatch.setattr(log, "warn_once", lines.append)
    return lines


def read_by_trainer(config: dict[str, Any]) -> None:
    HfTrainerDeepSpeedConfig(config)


def read_by_accelerate(config: dict[str, Any]) -> None:
    DeepSpeedPlugin(hf_ds_config=config)


each_reader = pytest.mark.parametrize("read", [read_by_trainer, read_by_accelerate])


@pytest.mark.promise("P6")
@each_reader
def test_the_key_that_keeps_the_optimizer_is_named_before_weights_are_loaded(read: Any, logged: list[str]) -> None:
    read({**AXOLOTL, **EMPTY})
    line = logged[0]
    assert line.startswith('Remove "zero_force_ds_cpu_optimizer": false, unless the script passes a DeepSpeedCPUAdam.')
    assert all(word in line for word in ("adamw_bnb_8bit", "SGD", "L2 decay", 'Use "adamw_torch"'))


@each_reader
@pytest.mark.parametrize(
    "config",
    [
        {**AXOLOTL, **EMPTY, "zero_force_ds_cpu_optimizer": True},
        {**AXOLOTL, **EMPTY, "optimizer": {"type": "AdamW"}},
        {**AXOLOTL, "deep_optimizer_states": {"enabled": False}},
        AXOLOTL,
    ],
)
def test_a_config_in_which_the_key_has_no_effect_logs_nothing(
    read: Any, config: dict[str, Any], logged: list[str]
) -> None:
    read(config)
    assert logged == []


@each_reader
def test_an_invalid_block_is_refused_before_weights_are_loaded(read: Any) -> None:
    with pytest.raises(ConfigError, match="plcement: is not a known key"):
        read({**AXOLOTL, "deep_optimizer_states": {"plcement": "cpu"}})


@each_reader
@each_config
def test_an_older_stage_is_named_before_weights_are_loaded(
    read: Any, config: dict[str, Any], logged: list[str]
) -> None:
    read({**config, **EMPTY})
    assert f"zero_optimization.stage: must be 3, found {config['zero_optimization']['stage']}." in logged[0]
    assert "`deep-opt-states doctor --config` prints the config for ZeRO-3" in logged[0]


@each_config
def test_the_doctor_prints_the_config_for_stage_3_and_accepts_it(config: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**config, **EMPTY}))
    (finding,) = examine_config(path).values()
    assert finding.status is Status.FAIL
    _, changes, printed = finding.remedy.split("\n\n")
    assert "4 GB per billion and micro-batch" in changes
    assert json.loads(printed) == as_stage_3({**config, **EMPTY})
    path.write_text(printed)
    (finding,) = examine_config(path).values()
    assert finding.status is Status.OK


@each_config
def test_only_settings_of_zero_change_for_stage_3(config: dict[str, Any]) -> None:
    changed = as_stage_3(config)
    before, after = config["zero_optimization"], changed["zero_optimization"]
    assert {**changed, "zero_optimization": before} == config
    assert list(changed) == list(config)
    assert before.keys() - after.keys() <= NOT_IN_STAGE_3
    assert after["stage"] == 3
    assert after["offload_optimizer"]["device"] == "cpu"
    added = {"stage", "offload_optimizer", "stage3_gather_16bit_weights_on_model_save"}
    assert {key for key, value in after.items() if before.get(key) != value} <= added
    # A script that has switched this off saves no whole parameters.
    key = "stage3_gather_16bit_weights_on_model_save"
    assert after[key] is before.get(key, True)


def test_the_keys_that_are_removed_are_keys_of_deepspeed() -> None:
    assert set(DeepSpeedZeroConfig.model_fields) >= NOT_IN_STAGE_3


def prepared(make: Any, config: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the class of the optimizer that Accelerate prepares, and the warnings that are logged."""
    lines: list[str] = []
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    model = torch.nn.Linear(8, 8)
    with mock.patch.object(log, "warn", lines.append):
        engine, _ = accelerator.prepare(model, make(model.parameters()))
    return type(engine.optimizer).__name__, lines


@ranks(1)
def test_a_replaced_optimizer_that_computes_something_else_is_named() -> None:
    found = {name: prepared(make, {**STAGE_3, **BLOCK}) for name, make in OPTIMIZERS.items()}
    assert [optimizer for optimizer, _ in found.values()] == [PLUGIN] * 3
    (line,) = found["SGD"][1]
    assert line.startswith("torch.optim.sgd.SGD does not train: Accelerate has replaced it by DeepSpeedCPUAdam")
    assert "L2 weight decay" in line
    assert found["Adam"][1] == found["AdamW"][1] == []


@ranks(1)
def test_the_config_in_the_refusal_of_an_older_stage_trains() -> None:
    found = {name: _trained_as_stage_3(_filled_in({**config, **BLOCK})) for name, config in CONFIGS.items()}
    assert found == dict.fromkeys(CONFIGS, PLUGIN)
