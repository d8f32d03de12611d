"""Check the hints about configs: blocks that DeepSpeed ignores or refuses, older stages, and replaced optimizers."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
from deepspeed.runtime.config import DeepSpeedConfig
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from deep_opt_states import log
from deep_opt_states.cli.config_check import examine_config
from deep_opt_states.config import ConfigError, Unsupported
from deep_opt_states.names import ACCELERATE_FIELDS, CONFIG_KEY, ignored_blocks, is_our_block
from tests.compat.frameworks.published import AXOLOTL
from tests.ranks import ranks

PLUGIN = "DeepOptimizerStates_Stage3"
EMPTY: dict[str, Any] = {CONFIG_KEY: {}}
ZERO_3: dict[str, Any] = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
MISSPELLINGS = [
    *("deep_optimiser_states", "deepOptimizerStates", "deep_optimizer", "dep_optimizer_states"),
    *("deepspeed_optimizer_states", " DEEP OPTIMIZER STATES ", "zero_optimization.deep_optimizer_states"),
]


def test_other_spellings_resemble_our_key_but_no_key_of_deepspeed_does() -> None:
    assert all(map(is_our_block, (CONFIG_KEY, *MISSPELLINGS)))
    spec = find_spec("deepspeed")
    assert spec is not None
    source = "".join(path.read_text() for path in Path(str(spec.origin)).parent.rglob("*.py"))
    # Strings, and the fields of pydantic models.
    found = re.findall(r"[\"'](\w[\w. -]*)[\"']|^    (\w+): ", source, re.MULTILINE)
    keys = {text or field for text, field in found}
    assert {"optimizer", "bf16", "datastates_ckpt", "offload_optimizer", "deepcompile"} <= keys
    assert [key for key in (*keys, "zero_optimization.stage", "", 1) if is_our_block(key)] == []


def read(**blocks: Any) -> None:
    DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": ZERO_3, **blocks})


PLACES: dict[str, dict[str, Any]] = {
    "zero_optimization": {"zero_optimization": {**ZERO_3, CONFIG_KEY: {"placement": "cpu"}}},
    "optimizer.params": {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, CONFIG_KEY: {"placement": "cpu"}}}},
    "deeper.0.1.down": {"deeper": [({}, {"down": {CONFIG_KEY: None}})]},
}


@pytest.mark.P6
def test_a_block_where_deepspeed_does_not_read_it_is_refused() -> None:
    for place, blocks in PLACES.items():
        for at_the_top in ({}, EMPTY):
            with pytest.raises(ConfigError) as caught:
                read(**blocks, **at_the_top)
            assert str(caught.value).splitlines() == [
                f'{CONFIG_KEY}: must be at the top level of the DeepSpeed config, found inside "{place}".',
                'Move it out, next to "zero_optimization": '
                '{"zero_optimization": {"stage": 3, ...}, "deep_optimizer_states": {...}}.',
            ]
    with pytest.raises(ConfigError, match=r'found inside "deepspeed"\.\n"deepspeed" contains the whole config: give'):
        DeepSpeedConfig({"deepspeed": {"zero_optimization": ZERO_3, **EMPTY}, "train_batch_size": 1})


def test_a_dictionary_that_does_not_enable_the_plugin_is_accepted() -> None:
    for block in ({"enabled": False}, False):
        read(optimizer={"type": "AdamW", CONFIG_KEY: block}, _disabled=EMPTY, notes={"1": [CONFIG_KEY]})
    inner: dict[str, Any] = {"deep_opt_states": {}}
    inner["again"] = [inner, {"again": inner}]
    assert len([*ignored_blocks({"inner": inner})]) == 1, "a config that contains itself is searched once"


@pytest.mark.P6
def test_a_block_in_the_yaml_file_of_accelerate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ACCELERATE_FIELDS, f"zero_stage,{CONFIG_KEY}")
    with pytest.raises(ConfigError, match=r'found in "deepspeed_config" of Accelerate\'s YAML file') as caught:
        read()
    assert "name that file there: deepspeed_config_file" in str(caught.value)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(log, "warn", lines.append)
    monkeypatch.setattr(log, "warn_once", cache(lines.append))
    return lines


def test_a_misspelled_key_anywhere_is_a_warning_that_names_its_place(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setenv(ACCELERATE_FIELDS, "zero_stage,deep_opt_states")
    misspelled = {"deep_optimiser_states": {}, "off": {"deep_opt_states": False}}
    for _ in range(2):
        read(optimizer={"type": "AdamW", "params": misspelled}, plugins=[{"deepOptStates": 1}])
    keys = ["optimizer.params.deep_optimiser_states", "plugins.0.deepOptStates", "deepspeed_config.deep_opt_states"]
    assert logged == [
        f'the key "{key}" in the DeepSpeed config has no effect: did you mean "{CONFIG_KEY}" at the top level? '
        "Until that is changed, stock DeepSpeed trains."
        for key in keys
    ]
    read(optimizer={"type": "AdamW", "params": misspelled}, **EMPTY)
    assert len(logged) == len(keys)


OLDER_STAGES: list[dict[str, Any]] = [
    # The key of 2020, which DeepSpeed still reads.
    {"zero_optimization": {"stage": 2, "cpu_offload": True, "contiguous_gradients": True, "overlap_comm": True}},
    {
        "zero_optimization": {
            "stage": 1,
            "offload_optimizer": {"device": "none"},
            "stage3_gather_16bit_weights_on_model_save": False,
            "elastic_checkpoint": True,
        }
    },
]
COMMON = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "bf16": {"enabled": True},
}
REMOVE_KEY = ('Remove "zero_force_ds_cpu_optimizer": false, unless', "adamw_bnb_8bit", "SGD", "L2", 'Use "adamw_torch"')
OLDER_STAGE = ("zero_optimization.stage: must be 3, found 2.", "`deep-opt-states doctor --config` prints the config")

HINTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({**AXOLOTL, **EMPTY}, REMOVE_KEY),
    ({**COMMON, **OLDER_STAGES[0], **EMPTY}, OLDER_STAGE),
    ({**AXOLOTL, **EMPTY, "zero_force_ds_cpu_optimizer": True}, ()),
    ({**AXOLOTL, **EMPTY, "optimizer": {"type": "AdamW"}}, ()),
    ({**AXOLOTL, CONFIG_KEY: {"enabled": False}}, ()),
]
"""A config, and parts of the first line that is logged when a framework reads it; none if nothing is logged."""


@pytest.mark.P6
@pytest.mark.parametrize(
    "read_by",
    [
        lambda config: HfTrainerDeepSpeedConfig(config).config,
        lambda config: DeepSpeedPlugin(hf_ds_config=config).deepspeed_config,
    ],
    ids=["Trainer", "Accelerate"],
)
def test_frameworks_name_what_will_be_refused_before_weights_are_loaded(read_by: Any, logged: list[str]) -> None:
    for config, parts in HINTS:
        logged.clear()
        read_by(config)
        assert all(part in logged[0] for part in parts) if parts else logged == []
    with pytest.raises(ConfigError, match="plcement: is not a known key"):
        read_by({**AXOLOTL, CONFIG_KEY: {"plcement": "cpu"}})
    passed_on = read_by({"train_batch_size": 1, "zero_optimization": ZERO_3, **PLACES["optimizer.params"]})
    with pytest.raises(ConfigError, match=r'found inside "optimizer\.params"'):
        DeepSpeedConfig(passed_on)


@ranks(1)
def test_the_config_for_stage_3_in_the_refusal_of_an_older_stage_trains(tmp_path: Path) -> None:
    """Check that only settings of ZeRO change, and that the doctor prints the same config."""
    path = tmp_path / "ds.json"
    for older in OLDER_STAGES:
        config = {**COMMON, **older, CONFIG_KEY: {"placement": "cpu"}}
        with pytest.raises(Unsupported) as refused:
            deepspeed.initialize(model=torch.nn.Linear(8, 8), config=config)
        printed = json.loads(str(refused.value).rpartition("\n\n")[2])
        path.write_text(json.dumps(config))
        (finding,) = examine_config(path).values()
        assert json.loads(finding.remedy.rpartition("\n\n")[2]) == printed
        before, after = config["zero_optimization"], printed["zero_optimization"]
        assert list({**printed, "zero_optimization": before}.items()) == list(config.items())
        # A script that has switched this off saves no whole parameters.
        saves_whole = "stage3_gather_16bit_weights_on_model_save"
        assert after[saves_whole] is before.get(saves_whole, True)
        changed = {key for key, value in after.items() if before.get(key) != value}
        assert changed <= {"stage", "offload_optimizer", saves_whole}

        model = torch.nn.Linear(8, 8)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=printed)
        engine.backward(engine(torch.ones(1, 8, dtype=torch.bfloat16)).sum())
        engine.step()
        assert type(engine.optimizer).__name__ == PLUGIN


@ranks(1)
def test_a_replaced_optimizer_that_computes_something_else_is_named() -> None:
    found: dict[str, list[str]] = {}
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": ZERO_3}
    for optimizer in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={**config, CONFIG_KEY: {"placement": "cpu"}}),
            kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
        )
        model = torch.nn.Linear(8, 8)
        with mock.patch.object(log, "warn", found.setdefault(optimizer.__name__, []).append):
            engine, _ = accelerator.prepare(model, optimizer(model.parameters(), lr=1e-3))
        assert type(engine.optimizer).__name__ == PLUGIN
    assert found["Adam"] == found["AdamW"] == []
    (line,) = found["SGD"]
    assert line.startswith("torch.optim.sgd.SGD does not train: Accelerate has replaced it by DeepSpeedCPUAdam")
    assert "L2 weight decay" in line
