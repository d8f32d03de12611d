"""Test the config block, and that every reader refuses malformed input by the rule, the value found, and the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.utils import DeepSpeedPlugin

from deep_opt_states.config import Config, ConfigError, parse_config
from deep_opt_states.names import CONFIG_KEY
from perf_model.json_input import MAX_FILE_BYTES
from perf_model.prediction.hardware import HardwareProfile, ProfileError
from perf_model.presets.machines import MACHINES
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Partition, Workload
from perf_model.training_run.hf_config import read_hf_config
from perf_model.training_run.model import ModelError
from tests.cli.planning import LLAMA

WORKLOAD = Workload.from_numels([10, 10, 10, 10])
CPU, STREAMED, RESIDENT = Placement

NAMES = [
    "embed.weight",
    *(f"layers.{layer}.{name}.weight" for layer in range(2) for name in ("attn", "mlp")),
    "head.weight",
]
SUB_GROUPS = [[Partition(name, 1024) for name in NAMES[:3]], [Partition(name, 1024) for name in NAMES[3:]]]
BY_NAME = [{"match": "*.mlp.*", "states": "cpu"}, {"match": "head.*", "states": "resident"}]
REST_STREAMED = {"match": "*", "states": "streamed"}


def parse(block: Any) -> Config:
    config = parse_config({"train_batch_size": 1, CONFIG_KEY: block})
    assert config is not None
    return config


def test_without_the_block_there_is_no_config_and_an_empty_block_enables_the_plugin_and_plans() -> None:
    assert parse_config({"train_batch_size": 1}) is None
    assert parse({}) == Config()
    assert parse({}).enabled
    workload = parse({}).workload(SUB_GROUPS)
    assert parse({}).plans(workload)
    assert parse({}).predicts(workload)
    assert all(field.description for field in Config.model_fields.values())


@pytest.mark.P3
def test_accelerate_accepts_a_block_that_writes_all_defaults_down() -> None:
    """Check that no default is "auto", a value that Accelerate fills in itself or refuses wherever it stands."""
    block = Config().model_dump(exclude_none=True)
    assert parse(block) == Config()
    required = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 3},
    }
    plugin = DeepSpeedPlugin(hf_ds_config={**required, CONFIG_KEY: block})
    plugin.deepspeed_config_process(must_match=False)
    assert plugin.deepspeed_config[CONFIG_KEY] == block


@pytest.mark.parametrize(
    ("block", "placements"),
    [
        ({"placement": "cpu"}, (CPU, CPU, CPU, CPU)),
        ({"placement": "streamed"}, (STREAMED,) * 4),
        ({"placement": "stride", "update_stride": 3}, (CPU, CPU, STREAMED, CPU)),
        ({"placement": "stride", "update_stride": 9}, (CPU, CPU, CPU, CPU)),
    ],
)
def test_each_rule_gives_its_placements(block: dict[str, Any], placements: tuple[Placement, ...]) -> None:
    config = parse(block)
    assert config.plan(WORKLOAD).placements == placements
    assert not config.plans(WORKLOAD)
    assert not config.predicts(WORKLOAD)


@pytest.mark.parametrize(
    ("rules", "plans"),
    [
        (BY_NAME, True),
        ([*BY_NAME, {"match": "*", "states": "planned"}], True),
        ([*BY_NAME, REST_STREAMED], False),
        ([*BY_NAME, {"match": ["embed.*", "*.attn.*"], "states": "streamed"}], False),
    ],
)
def test_rules_need_a_profile_only_if_a_parameter_is_planned(rules: list[dict[str, Any]], plans: bool) -> None:
    config = parse({"placement": rules})
    workload = config.workload(SUB_GROUPS)
    assert config.plans(workload) is plans
    assert config.predicts(workload) is plans
    assert parse({"placement": rules, "report": "folder"}).predicts(workload)
    rest = None if plans else STREAMED
    assert [unit.fixed for unit in workload.units] == [rest, rest, CPU, rest, CPU, RESIDENT]
    if not plans:
        assert config.plan(workload).placements == (STREAMED, STREAMED, CPU, STREAMED, CPU, RESIDENT)


@pytest.mark.P6
def test_a_rule_without_effect_is_refused_with_the_dotted_key_and_the_nearest_names() -> None:
    parse({"placement": BY_NAME}).check_names(NAMES)
    with pytest.raises(ConfigError) as caught:
        parse({"placement": [{"match": "heads.*", "states": "cpu"}]}).check_names(NAMES)
    assert str(caught.value).startswith(
        "deep_optimizer_states.placement[0].match: must match a parameter of the model, found 'heads.*'.\n"
        "The nearest names: head"
    )


RESIDENTS = '[{"match": "*", "states": "resident"}]'


@pytest.mark.P6
@pytest.mark.parametrize(
    ("block", "key", "found", "remedy"),
    [
        ([], "", "[]", ""),
        ({"enabled": 1}, "enabled", "1", ""),
        ({"placment": "cpu"}, "placment", "'cpu'", 'Did you mean "placement"'),
        ({"placement": "gpu"}, "placement", "'gpu'", f"Did you mean {RESIDENTS}, which keeps the states on the GPU"),
        ({"placement": "stremed"}, "placement", "'stremed'", 'Did you mean "streamed"? Leave it out'),
        ({"placement": "unheard"}, "placement", "'unheard'", "Leave it out"),
        ({"placement": "fraction"}, "placement", 'is no longer "fraction"', '"stride" with "update_stride": 2'),
        ({"placement": ["cpu", "streamed"]}, "placement", "", '[{"match": "*.mlp.*", "states": "streamed"}, '),
        (
            {"placement": {"match": "*", "states": "cpu"}},
            "placement",
            "{'match': '*', ",
            "Give a list of objects. For ",
        ),
        ({"placement": "stride"}, "update_stride", "", ""),
        (
            {"placement": "stride", "update_stride": 1},
            "update_stride",
            "or equal to 2, found 1",
            "it: The stride k of ",
        ),
        ({"placement": "cpu", "update_stride": 2}, "update_stride", "2", ""),
        ({"placement": BY_NAME, "num_slots": 4}, "num_slots", "4", ""),
        ({"placement": [{"match": "*", "states": "planned"}], "num_slots": 4}, "num_slots", "4", ""),
        ({"gpu_memory_gb": float("inf")}, "gpu_memory_gb", "inf", ""),
        ({"placement": "streamed", "gpu_memory_gb": 4}, "gpu_memory_gb", "4", ""),
        ({"placement": [*BY_NAME, REST_STREAMED], "gpu_memory_gb": 4}, "gpu_memory_gb", "4", ""),
        # ``tests/model/test_cutting.py`` has the other rules.
        ({"placement": [*BY_NAME, "cpu"]}, "placement[2]", "'cpu'", ""),
        ({"unit_size": 1e6}, "unit_size", "1000000.0", ""),
        ({"num_slots": 0}, "num_slots", "0", ""),
        ({"bind_cores": "no"}, "bind_cores", "'no'", ""),
        ({"eager": "auto"}, "eager", "must be \"planned\", true or false, found 'auto'", ""),
        ({"report": {"every_n_steps": 1}}, "report", "every_n_steps", ""),
        ({"untested_deepspeed": "refuse"}, "untested_deepspeed", "is no longer a key, found 'refuse'", "pin DeepSpeed"),
        ({"split_masters": 1}, "split_masters", "1", "bf16_optimizer_states"),
        ({"gpu_fraction": 0.5}, "gpu_fraction", "0.5", '"placement": "planned", or "stride" with "update_stride": 2'),
    ],
)
def test_an_invalid_value_is_refused_with_its_dotted_key(block: Any, key: str, found: str, remedy: str) -> None:
    first, *rest = message_of(lambda: parse(block), ConfigError).splitlines()
    assert first.startswith(f"{CONFIG_KEY}.{key}: " if key else f"{CONFIG_KEY}: ")
    assert found in first
    assert rest
    assert remedy in rest[0]


def test_all_invalid_keys_are_reported_in_a_short_and_printable_text() -> None:
    keys = ["\x1b[2J", "\U000be642" * 100, *(f"key {number}" for number in range(20))]
    message = message_of(lambda: parse(dict.fromkeys(keys, "value" * 1000)), ConfigError)
    assert message.count(CONFIG_KEY) >= 5
    assert message.replace("\n", "").isprintable()
    assert len(message) < 4000
    assert message.endswith(f"{len(keys) - 5} more keys are invalid, which are left out here.")


BLOCK: dict[str, Any] = {
    "enabled": True,
    "placement": [{"match": ["*.weight"], "states": "cpu"}, {"match": "*", "states": "streamed"}],
    "unit_size": 7,
    "num_slots": 2,
    "cpu_threads": 1,
    "bind_cores": False,
    "gpu_memory_gb": 1.0,
    "overlap_backward": True,
}
SMALL = {**LLAMA, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
OTHER_VALUES: tuple[object, ...] = (
    *(None, True, -1, 10**400, float("nan"), float("inf")),
    *("\x1b[31m\n", "x" * 100_000, [[]], {"a": {}}),
)
FILES: dict[str, bytes | None] = {
    "no file": None,
    "an empty file": b"",
    "half of an object": b'{"version": 2, ',
    "another type": b"[]",
    "a deep list": b"[" * 100_000,
    "a repeated key": b'{"version": 2, "version": 2}',
    "bytes that are no text": b"\xff\xfe\x00{",
    "NUL": b"\0" * 1000,
    "a large file": b" " * (MAX_FILE_BYTES + 1),
}


def with_other_values(valid: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "an unknown key", {**valid, "\x1b": 1}
    for key in valid:
        yield f"no {key}", {other: value for other, value in valid.items() if other != key}
        for value in OTHER_VALUES:
            yield f"{str(value)[:20]!r} at {key}", {**valid, key: value}


def message_of(read: Callable[[], object], error: type[ValueError]) -> str:
    """Return the message with which the input is refused, or "" if it is used. No other error may be raised."""
    try:
        read()
    except error as found:
        return str(found)
    return ""


def check(messages: dict[str, str]) -> None:
    """Check that most inputs are refused, each with the value found and a remedy, short and printable."""
    for damage, message in messages.items():
        if message:
            assert "found" in message, damage
            assert message.count("\n") or message.count(". "), damage
        assert message.replace("\n", "").isprintable(), damage
        assert len(message) <= 4_000, damage
    assert sum(map(bool, messages.values())) > len(messages) / 2


@pytest.mark.P6
@pytest.mark.parametrize(
    ("read", "error", "valid"),
    [
        (HardwareProfile.read, ProfileError, json.loads(MACHINES["h100-pcie5"].profile(4).to_json())),
        (read_hf_config, ModelError, SMALL | {"num_key_value_heads": 2, "vocab_size": 100}),
    ],
    ids=["profile", "config.json of a model"],
)
def test_a_malformed_file_is_refused_with_the_rule_the_value_and_the_remedy(
    read: Callable[[Path], object], error: type[ValueError], valid: dict[str, Any], tmp_path: Path
) -> None:
    path, messages = tmp_path / "given.json", {}
    contents = FILES | {name: json.dumps(found).encode() for name, found in with_other_values(valid)}
    for damage, content in contents.items():
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        messages[damage] = message_of(lambda: read(path), error)
        assert content is None or path.read_bytes() == content, damage
    check(messages)
    assert [damage for damage in FILES if not messages[damage]] == []


@pytest.mark.P6
def test_a_malformed_block_is_refused_with_the_rule_the_value_and_the_remedy() -> None:
    blocks = {"a word": "planned", "a list": [], **dict(with_other_values(BLOCK))}
    check(
        {
            damage: message_of(lambda block=block: parse_config({"deep_optimizer_states": block}), ConfigError)
            for damage, block in blocks.items()
        }
    )
