"""Check the warning for a block that DeepSpeed would ignore, and the remedy for one that DeepSpeed refuses."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from accelerate.commands import launch
from accelerate.utils import DeepSpeedPlugin
from deepspeed.runtime.config import DeepSpeedConfig
from pydantic import ValidationError
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from deep_opt_states import activation
from deep_opt_states.config import ConfigError
from deep_opt_states.names import ACCELERATE_FIELDS, CONFIG_KEY, ignored_blocks, resembles_config_key
from tests.launch import REPOSITORY, run_ranks

MISSPELLINGS = [
    "deep_optimiser_states",
    "deep_opt_states",
    "deepOptimizerStates",
    "DeepOptimizerStates",
    "deep-optimizer-states",
    "deep_optimizer_state",
    "deep_optimizers_states",
    "deep_optimizer",
    "deep_optimization_states",
    "deep_optimzer_states",
    "deep_optimizer_sates",
    "dep_optimizer_states",
    "deepoptimizerstates",
    "DEEP_OPTIMIZER_STATES",
    "deep optimizer states",
    "deep_optimizer_states ",
    "deep-opt-states",
    " deep_optimizer_states",
    "deepspeed_optimizer_states",
    "zero_optimization.deep_optimizer_states",
]

UNRELATED_KEYS = [
    "optimizer",
    "optimizer_states",
    "offload_optimizer",
    "deepspeed",
    "deepcompile",
    "zero_optimization.stage",
    "",
]


@pytest.mark.parametrize("key", MISSPELLINGS)
def test_other_spellings_resemble_our_key(key: str) -> None:
    assert resembles_config_key(key)


@pytest.mark.parametrize("key", [CONFIG_KEY, *UNRELATED_KEYS, 1, None])
def test_our_key_and_unrelated_keys_are_not_misspellings(key: object) -> None:
    assert not resembles_config_key(key)


def strings_of_deepspeed() -> Iterator[str]:
    """Yield every string in DeepSpeed's source: all keys of its config, at the top level and below, are among them."""
    spec = find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    for path in Path(spec.origin).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                # This is a field of a pydantic model.
                yield node.target.id


def test_no_key_of_deepspeed_resembles_ours() -> None:
    keys = {text for text in strings_of_deepspeed() if re.fullmatch(r"\w[\w. -]*", text) and len(text) < 100}
    known = {"train_batch_size", "zero_optimization", "zero_allow_untested_optimizer", "optimizer", "bf16", "aio"}
    assert known | {"datastates_ckpt", "bf16_optimizer_states", "offload_optimizer", "deepcompile"} <= keys
    assert [key for key in keys if resembles_config_key(key)] == []


def test_no_key_of_the_examples_and_frameworks_resembles_ours() -> None:
    config = json.loads((REPOSITORY / "examples" / "ds_config.json").read_text())
    # TRL adds keys with dots to the config of its reference model.
    keys = [*config, "zero_optimization.reduce_bucket_size", "zero_optimization.stage3_prefetch_bucket_size"]
    assert [key for key in keys if resembles_config_key(key)] == []


ZERO_3 = {"stage": 3, "offload_optimizer": {"device": "cpu"}}


def read(zero: dict[str, Any], **others: Any) -> None:
    DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **others})


@pytest.mark.parametrize("inside", ["zero_optimization", "zero_optimization.offload_optimizer"])
def test_a_misplaced_block_is_refused_with_the_remedy(inside: str) -> None:
    offload: dict[str, Any] = {"device": "cpu"}
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": offload}
    (zero if inside == "zero_optimization" else offload)[CONFIG_KEY] = {"placement": "cpu"}
    with pytest.raises(ConfigError) as caught:
        read(zero)
    assert str(caught.value).splitlines() == [
        f'{CONFIG_KEY}: must be at the top level of the DeepSpeed config, found inside "{inside}".',
        'Move it out, next to "zero_optimization": '
        '{"zero_optimization": {"stage": 3, ...}, "deep_optimizer_states": {...}}.',
    ]


def test_other_errors_of_deepspeed_do_not_mention_the_plugin() -> None:
    with pytest.raises(ValidationError) as caught:
        read({"stage": 3, "unknown": 1})
    assert "deep_optimizer_states" not in str(caught.value)


PLACES = {
    "optimizer": {"optimizer": {"type": "AdamW", CONFIG_KEY: {}}},
    "optimizer.params": {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, CONFIG_KEY: {"placement": "cpu"}}}},
    "scheduler": {"scheduler": {"type": "WarmupLR", CONFIG_KEY: True}},
    "activation_checkpointing": {"activation_checkpointing": {CONFIG_KEY: {}}},
    "checkpoint.writer": {"checkpoint": {"writer": {CONFIG_KEY: {}}}},
    "plugins.1": {"plugins": [{"name": "other"}, {CONFIG_KEY: {}}]},
    "deeper.0.1.down": {"deeper": [({}, {"down": {CONFIG_KEY: None}})]},
}


@pytest.mark.promise("P6")
@pytest.mark.parametrize("also_at_the_top", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_a_block_where_deepspeed_does_not_read_it_is_refused(place: str, also_at_the_top: bool) -> None:
    with pytest.raises(ConfigError) as caught:
        read(ZERO_3, **PLACES[place], **({CONFIG_KEY: {}} if also_at_the_top else {}))
    rule, remedy = str(caught.value).splitlines()
    assert rule == f'{CONFIG_KEY}: must be at the top level of the DeepSpeed config, found inside "{place}".'
    assert remedy.startswith('Move it out, next to "zero_optimization": {"zero_optimization": {"stage": 3, ...}')


@pytest.mark.promise("P6")
@pytest.mark.parametrize("wrapper", ["deepspeed", "deepspeed_config", "hf_ds_config"])
def test_a_whole_config_inside_another_dictionary_is_refused(wrapper: str) -> None:
    with pytest.raises(ConfigError, match=f'found inside "{wrapper}".\n"{wrapper}" contains the whole config: give'):
        DeepSpeedConfig({wrapper: {"zero_optimization": ZERO_3, CONFIG_KEY: {}}, "train_batch_size": 1})


@pytest.mark.parametrize("framework", ["Accelerate", "Trainer"])
def test_a_misplaced_block_is_refused_in_the_config_that_a_framework_passes_on(framework: str) -> None:
    config = {"train_batch_size": 1, "zero_optimization": ZERO_3, **PLACES["optimizer.params"]}
    if framework == "Trainer":
        passed_on = HfTrainerDeepSpeedConfig(config).config
    else:
        passed_on = DeepSpeedPlugin(hf_ds_config=config).deepspeed_config
    with pytest.raises(ConfigError, match=r'found inside "optimizer\.params"'):
        DeepSpeedConfig(passed_on)


ACCELERATE_YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 3
  offload_optimizer_device: cpu
  KEY: {}
mixed_precision: bf16
num_machines: 1
num_processes: 1
"""


def launched_environment(key: str, folder: Path) -> dict[str, str]:
    """Return the environment that Accelerate's launcher gives to a script, for a YAML file with ``key``."""
    (folder / "accelerate.yaml").write_text(ACCELERATE_YAML.replace("KEY", key))
    arguments = ["--config_file", str(folder / "accelerate.yaml"), "script.py"]
    environments: list[dict[str, str]] = []

    def started(args: Any) -> None:
        environments.append(launch.prepare_deepspeed_cmd_env(args)[1])

    with mock.patch.object(launch, "deepspeed_launcher", started):
        launch.launch_command(launch.launch_command_parser().parse_args(arguments))
    return environments[0]


@pytest.mark.promise("P6")
def test_a_block_in_the_yaml_file_of_accelerate_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the launcher itself: of a key that it does not know, it passes on the name."""
    environment = launched_environment(CONFIG_KEY, tmp_path)
    monkeypatch.setenv(ACCELERATE_FIELDS, environment[ACCELERATE_FIELDS])
    with pytest.raises(ConfigError) as caught:
        read(ZERO_3)
    assert 'found in "deepspeed_config" of Accelerate\'s YAML file' in str(caught.value)
    assert "name that file there: deepspeed_config_file" in str(caught.value)
    monkeypatch.setenv(ACCELERATE_FIELDS, launched_environment("zero3_init_flag", tmp_path)[ACCELERATE_FIELDS])
    read(ZERO_3)


@pytest.mark.parametrize(
    "config",
    [
        {"optimizer": {"type": "AdamW", CONFIG_KEY: {"enabled": False}}},
        {"optimizer": {"type": "AdamW", CONFIG_KEY: False}},
        {"_disabled": {CONFIG_KEY: {}}},
        {"notes": {"text": f"{CONFIG_KEY} is not used here", "words": [CONFIG_KEY]}},
        {"data_efficiency": {"enabled": False, "notes": {"deep_optimizer": "a free word"}}},
    ],
)
def test_a_dictionary_that_does_not_enable_the_plugin_is_accepted(config: dict[str, Any]) -> None:
    read(ZERO_3, **config)


def test_a_config_that_contains_itself_is_searched_once() -> None:
    inner: dict[str, Any] = {"deep_opt_states": {}}
    inner["again"] = [inner, {"again": inner}]
    assert [block.path for block in ignored_blocks({"inner": inner, CONFIG_KEY: {"deep_opt_states": {}}})] == [
        ("inner", "deep_opt_states")
    ]


def test_a_misspelled_key_anywhere_is_a_warning_that_names_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr("deep_opt_states.log.warn", logged.append)
    monkeypatch.setattr(activation, "_warned_of", set())
    monkeypatch.setenv(ACCELERATE_FIELDS, launched_environment("deep_opt_states", tmp_path)[ACCELERATE_FIELDS])
    misspelled = {"deep_optimiser_states": {}, "off": {"deep_opt_states": False}}
    for _ in range(2):
        read(ZERO_3, optimizer={"type": "AdamW", "params": misspelled}, plugins=[{"deepOptStates": 1}])
    keys = ["optimizer.params.deep_optimiser_states", "plugins.0.deepOptStates", "deepspeed_config.deep_opt_states"]
    assert logged == [
        f'the key "{key}" in the DeepSpeed config has no effect: did you mean "{CONFIG_KEY}" at the top level? '
        "Until that is changed, stock DeepSpeed trains."
        for key in keys
    ]
    read(ZERO_3, optimizer={"type": "AdamW", "params": misspelled}, **{CONFIG_KEY: {}})
    assert len(logged) == len(keys)


def test_rank_0_warns_once_of_a_misspelled_key(tmp_path: Path) -> None:
    """Check two engines of one config on each of two ranks: all train with stock DeepSpeed."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {**ZERO_3, "sub_group_size": 64},
        "deep_opt_states": {"placement": "cpu"},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    script = [str(Path(__file__).parent / "engine_per_config.py"), str(tmp_path / "report"), str(path), str(path)]
    ranks = run_ranks(2, script, timeout_s=120)
    for rank, finished in enumerate(ranks):
        assert finished.returncode == 0, finished.output[-5000:]
        for engine in json.loads((tmp_path / f"report.{rank}").read_text())["engines"]:
            assert engine["optimizer"].endswith(".DeepSpeedZeroOptimizer_Stage3")
            # The warning loads no module of the plugin that needs torch: neither the config nor a class.
            ours = {name for name in engine["modules"] if name.startswith(("deep_opt_states.", "perf_model"))}
            assert ours <= {f"deep_opt_states.{name}" for name in ("activation", "names", "log", "waiting")}
    output = "".join(finished.output for finished in ranks)
    assert output.count('the key "deep_opt_states" in the DeepSpeed config has no effect') == 1
    assert 'did you mean "deep_optimizer_states"?' in ranks[0].output
