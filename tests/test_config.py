"""Test the config block: the plan that it defines, and the errors for invalid blocks."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep_opt_states.config import Config, ConfigError, parse_config
from deep_opt_states.names import CONFIG_KEY
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Workload

WORKLOAD = Workload.from_numels([10, 10, 10, 10])
CPU, STREAMED = Placement.CPU, Placement.STREAMED


def parse(block: Any) -> Config:
    config = parse_config({"train_batch_size": 1, CONFIG_KEY: block})
    assert config is not None
    return config


def test_a_config_without_the_block_is_accepted() -> None:
    assert parse_config({"train_batch_size": 1}) is None


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
        ({"placement": "fraction", "gpu_fraction": 0}, (CPU, CPU, CPU, CPU)),
        ({"placement": "fraction", "gpu_fraction": 0.5}, (CPU, STREAMED, CPU, STREAMED)),
        ({"placement": "fraction", "gpu_fraction": 1}, (STREAMED,) * 4),
        ({"placement": ["streamed", "cpu", "resident", "streamed"]}, (STREAMED, CPU, Placement.RESIDENT, STREAMED)),
    ],
)
def test_each_rule_gives_its_placements(block: dict[str, Any], placements: tuple[Placement, ...]) -> None:
    assert parse(block).plan(WORKLOAD).placements == placements


def test_an_error_has_the_rule_the_value_and_the_remedy() -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"placement": "stride", "update_stride": 1})
    assert str(caught.value) == (
        "deep_optimizer_states.update_stride: must be an integer of at least 2, found 1.\n"
        'Every k-th sub-group is updated on the GPU; for all of them, use "placement": "streamed".'
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
        ({"placement": "fraction"}, "gpu_fraction", ""),
        ({"placement": "fraction", "gpu_fraction": 1.01}, "gpu_fraction", "1.01"),
        ({"placement": "fraction", "gpu_fraction": -0.1}, "gpu_fraction", "-0.1"),
        ({"placement": "fraction", "gpu_fraction": float("nan")}, "gpu_fraction", "nan"),
        ({"gpu_fraction": 0.5}, "gpu_fraction", "0.5"),
        ({"gpu_memory_gb": -1}, "gpu_memory_gb", "-1"),
        ({"gpu_memory_gb": float("inf")}, "gpu_memory_gb", "inf"),
        ({"gpu_memory_gb": "4"}, "gpu_memory_gb", "4"),
        ({"placement": "streamed", "gpu_memory_gb": 4}, "gpu_memory_gb", "4"),
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


def test_the_error_for_a_misspelt_key_suggests_the_right_one() -> None:
    with pytest.raises(ConfigError, match='Did you mean "placement"'):
        parse({"placment": "cpu"})


def test_all_invalid_keys_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"enabled": 1, "num_slots": 0})
    assert f"{CONFIG_KEY}.enabled" in str(caught.value)
    assert f"{CONFIG_KEY}.num_slots" in str(caught.value)


def test_a_list_of_another_length_is_refused_with_the_number_of_sub_groups() -> None:
    with pytest.raises(ConfigError, match="this model has 4 sub-groups, found 2 entries"):
        parse({"placement": ["cpu", "streamed"]}).plan(WORKLOAD)


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
