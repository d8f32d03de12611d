"""Check the warning for a block that DeepSpeed would ignore, and the remedy for one that DeepSpeed refuses."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from deep_opt_states.config import ConfigError
from deep_opt_states.names import CONFIG_KEY, resembles_config_key
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
    from deepspeed.runtime.config import DeepSpeedConfig

    DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **others})


@pytest.mark.parametrize("key", [CONFIG_KEY, "deep_opt_states"])
@pytest.mark.parametrize("inside", ["zero_optimization", "offload_optimizer"])
def test_a_misplaced_block_is_refused_with_the_remedy(inside: str, key: str) -> None:
    block = {"placement": "cpu"}
    offload = {"device": "cpu"}
    zero = {"stage": 3, "offload_optimizer": offload}
    (offload if inside == "offload_optimizer" else zero)[key] = block
    with pytest.raises(ValidationError) as caught:
        read(zero)
    (line,) = caught.value.errors(include_url=False)
    assert line["type"] == "extra_forbidden"
    assert line["loc"] == ((key,) if inside == "zero_optimization" else (inside, key))
    assert line["input"] == block
    assert line["msg"] == (
        '"deep_optimizer_states" must be at the top level of the DeepSpeed config, found inside another block. Move it '
        'out, next to "zero_optimization": {"zero_optimization": {"stage": 3, ...}, "deep_optimizer_states": {...}}'
    )
    assert str(block) in str(caught.value)


NESTED: list[tuple[str, dict[str, Any]]] = [
    ("optimizer", {"optimizer": {"type": "AdamW", CONFIG_KEY: {}}}),
    ("optimizer.params", {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, CONFIG_KEY: {"placement": "cpu"}}}}),
    ("scheduler", {"scheduler": {"type": "WarmupLR", "params": {}, CONFIG_KEY: {}}}),
    ("activation_checkpointing", {"activation_checkpointing": {CONFIG_KEY: {}}}),
    ("curriculum.stages.1", {"curriculum": {"stages": [{"x": 1}, {CONFIG_KEY: {}}]}}),
    ("deepspeed", {"deepspeed": {"zero_optimization": ZERO_3, CONFIG_KEY: {}}}),
    ("deepspeed_config.hf_ds_config", {"deepspeed_config": {"hf_ds_config": {CONFIG_KEY: {}}}}),
]
"""Blocks that DeepSpeed passes on unread, and wrappers of Hugging Face and Accelerate around the whole JSON."""


@pytest.mark.parametrize(("path", "others"), NESTED, ids=[path for path, _ in NESTED])
def test_a_block_where_deepspeed_ignores_it_is_refused_with_its_path(path: str, others: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=re.escape(f'top level of the DeepSpeed config, found inside "{path}". Move')):
        read(ZERO_3, **others)


def test_a_block_in_a_disabled_dictionary_changes_nothing() -> None:
    read(ZERO_3, _old={CONFIG_KEY: {}}, optimizer={"type": "AdamW", "#params": {CONFIG_KEY: {}}})


@pytest.mark.parametrize("block", [False, {"enabled": False}])
def test_a_nested_block_that_is_switched_off_changes_nothing(block: object) -> None:
    read(ZERO_3, optimizer={"type": "AdamW", CONFIG_KEY: block})


def test_a_misspelled_block_is_named_at_any_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr("deep_opt_states.zero.internals.log.log_rank_0", logged.append)
    read(ZERO_3, optimizer={"type": "AdamW", "params": {"deep_opt_states": {"of": "this test"}}})
    (line,) = logged
    assert 'the key "optimizer.params.deep_opt_states" in the DeepSpeed config has no effect' in line
    assert 'did you mean "deep_optimizer_states", at the top level?' in line


def test_the_other_errors_next_to_a_misplaced_block_stay_as_they_are() -> None:
    wrong = {
        "stage": 9,
        "unknown": 1,
        "sub_group_size": "many",
        "reduce_bucket_size": -1,
        "offload_optimizer": {"device": "disk"},
    }
    with pytest.raises(ValidationError) as stocks:
        read(wrong)
    with pytest.raises(ValidationError) as ours:
        read({**wrong, CONFIG_KEY: {}})

    def lines(error: ValidationError) -> list[tuple[Any, ...]]:
        return [
            (line["type"], line["loc"], line["msg"], line["input"])
            for line in error.errors()
            if line["loc"] != (CONFIG_KEY,)
        ]

    assert len(lines(stocks.value)) == 5
    assert lines(ours.value) == lines(stocks.value)
    assert ours.value.title == stocks.value.title


def test_other_errors_of_deepspeed_do_not_mention_the_plugin() -> None:
    with pytest.raises(ValidationError) as caught:
        read({"stage": 3, "unknown": 1})
    assert "deep_optimizer_states" not in str(caught.value)


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
            log = ("zero", "zero.internals", "zero.internals.log")
            assert ours <= {f"deep_opt_states.{name}" for name in ("activation", "names", *log)}
    output = "".join(finished.output for finished in ranks)
    assert output.count('the key "deep_opt_states" in the DeepSpeed config has no effect') == 1
    assert 'did you mean "deep_optimizer_states"?' in ranks[0].output
