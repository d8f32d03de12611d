"""Test the config block: the plan that it defines, and the errors for invalid blocks."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from accelerate.utils import DeepSpeedPlugin
from hypothesis import given
from hypothesis import strategies as st

from deep_opt_states.config import Config, ConfigError, parse_config
from deep_opt_states.names import CONFIG_KEY
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Partition, Workload

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


def test_a_config_without_the_block_is_accepted() -> None:
    assert parse_config({"train_batch_size": 1}) is None


@pytest.mark.promise("P3")
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


def test_an_empty_block_enables_the_plugin() -> None:
    assert parse({}) == Config()
    assert parse({}).enabled


@pytest.mark.parametrize(
    ("block", "placements"),
    [
        ({"placement": "cpu"}, (CPU, CPU, CPU, CPU)),
        ({"placement": "streamed"}, (STREAMED,) * 4),
        ({"placement": "stride", "update_stride": 2}, (CPU, STREAMED, CPU, STREAMED)),
        ({"placement": "stride", "update_stride": 3}, (CPU, CPU, STREAMED, CPU)),
        ({"placement": "stride", "update_stride": 9}, (CPU, CPU, CPU, CPU)),
    ],
)
def test_each_rule_gives_its_placements(block: dict[str, Any], placements: tuple[Placement, ...]) -> None:
    config = parse(block)
    assert config.plan(WORKLOAD).placements == placements
    assert not config.plans(WORKLOAD)
    assert not config.predicts(WORKLOAD)


def test_units_are_of_the_configured_size_or_of_the_planners_or_of_the_default() -> None:
    long = [[Partition("layer.weight", 120_000_000)]]
    units = {
        name: [unit.numel for unit in parse(block).workload(long, size).units]
        for name, block, size in (
            ("default", {"placement": "cpu"}, None),
            ("planner", {}, 60_000_000),
            ("config", {"unit_size": 120_000_000}, 60_000_000),
        )
    }
    assert units == {"default": [40_000_000] * 3, "planner": [60_000_000] * 2, "config": [120_000_000]}


def test_placements_are_of_units() -> None:
    def placements(**block: Any) -> list[tuple[int, Placement]]:
        config = parse({"unit_size": 1024, **block})
        plan = config.plan(config.workload(SUB_GROUPS))
        return [
            (unit.ranges[0].sub_group, placement)
            for unit, placement in zip(plan.workload.units, plan.placements, strict=True)
        ]

    assert placements(placement="stride", update_stride=2) == [
        (0, CPU), (0, STREAMED), (0, CPU), (1, STREAMED), (1, CPU), (1, STREAMED)
    ]  # fmt: skip
    assert [placement for _, placement in placements(placement=[*BY_NAME, REST_STREAMED])] == [
        STREAMED, STREAMED, CPU, STREAMED, CPU, RESIDENT
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rules", "plans"),
    [
        (BY_NAME, True),
        ([*BY_NAME, {"match": "*", "states": "planned"}], True),
        ([*BY_NAME, REST_STREAMED], False),
        ([*BY_NAME, {"match": ["embed.*", "*.attn.*"], "states": "streamed"}], False),
    ],
)
def test_rules_need_a_profile_only_if_a_parameter_of_the_model_is_planned(
    rules: list[dict[str, Any]], plans: bool
) -> None:
    config = parse({"placement": rules})
    workload = config.workload(SUB_GROUPS)
    assert config.plans(workload) is plans
    assert config.predicts(workload) is plans
    assert parse({"placement": rules, "report": "folder"}).predicts(workload)
    rest = None if plans else STREAMED
    assert [unit.fixed for unit in workload.units] == [rest, rest, CPU, rest, CPU, RESIDENT]
    if not plans:
        assert config.plan(workload).placements == (STREAMED, STREAMED, CPU, STREAMED, CPU, RESIDENT)


def test_the_default_block_plans_and_needs_a_profile() -> None:
    workload = parse({}).workload(SUB_GROUPS)
    assert parse({}).plans(workload)
    assert parse({}).predicts(workload)


def test_a_rule_without_effect_is_refused_with_the_dotted_key() -> None:
    parse({"placement": BY_NAME}).check_names(NAMES)
    parse({}).check_names(NAMES)
    with pytest.raises(ConfigError) as caught:
        parse({"placement": [{"match": "heads.*", "states": "cpu"}]}).check_names(NAMES)
    assert str(caught.value).startswith(
        "deep_optimizer_states.placement[0].match: must match a parameter of the model, found 'heads.*'.\n"
        "The nearest names: head"
    )
    with pytest.raises(ConfigError, match="which matches only frozen parameters"):
        parse({"placement": BY_NAME}).check_names(NAMES[:-1], frozen=NAMES[-1:])
    with pytest.raises(ConfigError, match=r'another name of "embed\.weight"'):
        parse({"placement": BY_NAME}).check_names(NAMES[:-1], aliases={NAMES[-1]: NAMES[0]})


def test_an_error_has_the_rule_the_value_and_the_remedy() -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"placement": "stride", "update_stride": 1})
    assert str(caught.value) == (
        "deep_optimizer_states.update_stride: must be an integer of at least 2, found 1.\n"
        "Leave it out for the default, or correct it: "
        'The stride k of "placement": "stride", the rule of the paper: '
        "unit i, counted from 0, is streamed if i + 1 is a multiple of k."
    )


@pytest.mark.parametrize(
    ("block", "key", "found"),
    [
        ([], "", "[]"),
        ("on", "", "'on'"),
        ({"enabled": 1}, "enabled", "1"),
        ({"enabled": "true"}, "enabled", "'true'"),
        ({"placement": "gpu"}, "placement", "'gpu'"),
        ({"placement": "auto"}, "placement", "'auto'"),
        ({"placement": 2}, "placement", "2"),
        ({"placement": None}, "placement", "None"),
        ({"placement": ["cpu", "gpu"]}, "placement", "'gpu'"),
        ({"placement": "stride"}, "update_stride", ""),
        ({"placement": "stride", "update_stride": "2"}, "update_stride", "'2'"),
        ({"placement": "stride", "update_stride": 2.5}, "update_stride", "2.5"),
        ({"placement": "stride", "update_stride": True}, "update_stride", "True"),
        ({"placement": "cpu", "update_stride": 2}, "update_stride", "2"),
        ({"placement": "fraction"}, "placement", "'fraction'"),
        ({"placement": BY_NAME, "num_slots": 4}, "num_slots", "4"),
        ({"gpu_memory_gb": -1}, "gpu_memory_gb", "-1"),
        ({"gpu_memory_gb": float("inf")}, "gpu_memory_gb", "inf"),
        ({"gpu_memory_gb": "4"}, "gpu_memory_gb", "4"),
        ({"placement": "streamed", "gpu_memory_gb": 4}, "gpu_memory_gb", "4"),
        ({"placement": [*BY_NAME, REST_STREAMED], "gpu_memory_gb": 4}, "gpu_memory_gb", "4"),
        ({"placement": [{"match": "*", "states": "planned"}], "num_slots": 4}, "num_slots", "4"),
        ({"num_slots": 4}, "num_slots", "4"),
        ({"placement": BY_NAME, "update_stride": 2}, "update_stride", "2"),
        ({"placement": [*BY_NAME, "cpu"]}, "placement[2]", "'cpu'"),
        ({"placement": [{"states": "cpu"}]}, "placement[0].match", "nothing"),
        ({"placement": [{"match": "*", "states": "gpu"}]}, "placement[0].states", "'gpu'"),
        ({"placement": [{"match": "*", "state": "cpu"}]}, "placement[0].state", "'cpu'"),
        ({"placement": {"match": "*", "states": "cpu"}}, "placement", "{'match': '*', 'states': 'cpu'}"),
        ({"unit_size": 0}, "unit_size", "0"),
        ({"unit_size": 1e6}, "unit_size", "1000000.0"),
        ({"unit_size": "1"}, "unit_size", "'1'"),
        ({"num_slots": 0}, "num_slots", "0"),
        ({"num_slots": 1.0}, "num_slots", "1.0"),
        ({"cpu_threads": 0}, "cpu_threads", "0"),
        ({"cpu_threads": 2.0}, "cpu_threads", "2.0"),
        ({"cpu_threads": "4"}, "cpu_threads", "'4'"),
        ({"bind_cores": 1}, "bind_cores", "1"),
        ({"bind_cores": "no"}, "bind_cores", "'no'"),
        ({"report": True}, "report", "True"),
        ({"report": ""}, "report", "''"),
        ({"report": {"every_n_steps": 1}}, "report", "every_n_steps"),
        ({"placment": "cpu"}, "placment", "'cpu'"),
    ],
)
@pytest.mark.promise("P6")
def test_an_invalid_value_is_refused_with_its_dotted_key(block: Any, key: str, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(block)
    dotted = f"{CONFIG_KEY}.{key}" if key else CONFIG_KEY
    first, *remedy = str(caught.value).splitlines()
    assert first.startswith(f"{dotted}: ")
    assert found in first
    assert remedy


def test_keys_of_the_planner_are_accepted_where_rules_leave_something_to_the_planner() -> None:
    assert parse({"placement": BY_NAME, "gpu_memory_gb": 4}).gpu_memory_gb == 4
    assert parse({"placement": [*BY_NAME, REST_STREAMED], "num_slots": 4}).num_slots == 4


def test_the_error_for_a_misspelt_key_suggests_the_right_one() -> None:
    with pytest.raises(ConfigError, match='Did you mean "placement"'):
        parse({"placment": "cpu"})


@pytest.mark.parametrize(
    ("placement", "question"),
    [
        ("stremed", 'Did you mean "streamed"? Leave it out'),
        ("auto", 'Did you mean "planned"? Leave it out'),
        ("resident", 'Did you mean [{"match": "*", "states": "resident"}]? Leave it out'),
        (
            "gpu",
            'Did you mean [{"match": "*", "states": "resident"}], which keeps the states on the GPU, or "streamed",',
        ),
        ("unheard", "Leave it out"),
        ({"match": "*", "states": "cpu"}, 'Give a list of objects. For example: {"match": '),
    ],
)
def test_an_invalid_placement_is_answered_with_the_one_that_was_meant(placement: Any, question: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"placement": placement})
    assert str(caught.value).splitlines()[1].startswith(question)


@pytest.mark.parametrize("value", [True, False, 1, "refuse"])
@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("untested_deepspeed", "pin DeepSpeed in your environment"),
        ("split_masters", "bf16_optimizer_states"),
        ("gpu_fraction", '"placement": "planned", or "stride" with "update_stride": 2'),
    ],
)
def test_a_retired_key_is_refused_whatever_its_value_is_with_the_replacement(
    key: str, remedy: str, value: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({key: value})
    rule, replacement = str(caught.value).splitlines()
    assert rule == f"{CONFIG_KEY}.{key}: is no longer a key, found {value!r}."
    assert replacement.startswith("Remove the key: ")
    assert remedy in replacement


def test_all_invalid_keys_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"enabled": 1, "num_slots": 0})
    assert f"{CONFIG_KEY}.enabled" in str(caught.value)
    assert f"{CONFIG_KEY}.num_slots" in str(caught.value)


def test_an_error_is_short_and_printable_whatever_the_keys_are() -> None:
    keys = ["\x1b[2J", "\U000be642" * 100, *(f"key {number}" for number in range(20))]
    with pytest.raises(ConfigError) as caught:
        parse(dict.fromkeys(keys, "value" * 1000))
    message = str(caught.value)
    assert message.replace("\n", "").isprintable()
    assert len(message) < 4000
    assert message.endswith(f"{len(keys) - 5} more keys are invalid, which are left out here.")


@pytest.mark.parametrize(
    ("placement", "rule", "remedy"),
    [
        ("fraction", 'is no longer "fraction"', '"stride" with "update_stride": 2'),
        (["cpu", "streamed"], "is no longer a list of words", '[{"match": "*.mlp.*", "states": "streamed"}, '),
    ],
)
def test_a_retired_placement_is_refused_with_the_replacement(placement: object, rule: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"placement": placement})
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"{CONFIG_KEY}.placement: {rule}")
    assert first.endswith(f"found {placement!r}.")
    assert remedy in second


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*Config.model_fields, "other"]), json_values, max_size=4))
def test_any_json_is_a_config_or_a_config_error(block: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        parse(block)


def test_every_key_has_a_description() -> None:
    for key, field in Config.model_fields.items():
        assert field.description, key


def test_another_word_for_eager_updates_is_refused_with_the_three_values() -> None:
    with pytest.raises(ConfigError, match=r'eager: must be "planned", true or false, found .auto'):
        parse_config({"deep_optimizer_states": {"eager": "auto"}})
