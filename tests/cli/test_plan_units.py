"""Test what ``plan`` prints about units and rules, and that the block to paste gives the printed plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deep_opt_states.config import Config, parse_config
from perf_model.__main__ import main
from perf_model.cli.plan_command import MAX_ROWS
from perf_model.presets.models import MODELS
from perf_model.schedule.placement import Placement
from perf_model.training_run.job import Job
from tests.cli.planning import job, planned

MODEL = "Llama-3-8B"
RULES: list[dict[str, Any]] = [
    {"match": "*.mlp.*", "states": "cpu"},
    {"match": "lm_head.*", "states": "resident"},
    {"match": "*", "states": "planned"},
]
EVERYTHING_FIXED: list[dict[str, Any]] = [
    {"match": "model.layers.[0-3].*", "states": "resident"},
    {"match": ["lm_head.*", "*.embed_tokens.*"], "states": "streamed"},
    {"match": "*", "states": "cpu"},
]
NOT_ALL_FIT: dict[str, Any] = {"model": MODEL, "world_size": 1, "ranks_per_node": 1, "gpu_memory_gb": 50}


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    return write(tmp_path, RULES)


def write(folder: Path, rules: object) -> Path:
    path = folder / "rules.json"
    path.write_text(json.dumps(rules))
    return path


def config_of(found: dict[str, Any]) -> Config:
    config = parse_config(found["deepspeed_config"])
    assert config is not None
    return config


def sub_groups() -> Any:
    return Job(shape=MODELS[MODEL], world_size=1, ranks_per_node=1, micro_batch=1, sequence=2048).sub_groups


def test_the_units_in_json_cover_the_sub_groups_and_have_the_counted_placements() -> None:
    found = planned(job(**NOT_ALL_FIT))
    units = found["units"]
    assert [unit["index"] for unit in units] == list(range(len(units)))
    for number, partitions in enumerate(sub_groups()):
        runs = [run for unit in units for run in unit["ranges"] if run[0] == number]
        ends = [begin + numel for _, begin, numel in runs]
        assert [begin for _, begin, _ in runs] == [0, *ends[:-1]]
        assert ends[-1] == sum(partition.numel for partition in partitions)
    assert found["placement"] == {
        placement.value: [unit["placement"] for unit in units].count(placement.value) for placement in Placement
    }
    assert units[0]["label"].startswith("model.embed_tokens")
    assert units[-2]["label"].startswith("lm_head")
    assert units[-1]["label"] == "model.layers.0 to model.norm", "the norms are a param group of their own"
    assert {unit["rule"] for unit in units} == {None}, "the planner placed all of them"


def test_units_in_rules_have_the_placement_of_their_rule_and_name_it(rules: Path) -> None:
    units = planned(job(**NOT_ALL_FIT, rules=rules))["units"]
    by_rule = {
        rule: {unit["placement"] for unit in units if unit["rule"] == rule} for rule in {u["rule"] for u in units}
    }
    assert by_rule.pop("rule '*.mlp.*'") == {"cpu"}
    assert by_rule.pop("rule 'lm_head.*'") == {"resident"}
    assert set(by_rule) == {None}, "the planner placed the rest"
    heads = [unit for unit in units if unit["label"].startswith("lm_head")]
    assert sum(unit["numel"] for unit in heads) == pytest.approx(MODELS[MODEL].vocab * MODELS[MODEL].hidden, abs=16)
    assert {unit["rule"] for unit in heads} == {"rule 'lm_head.*'"}


def test_the_table_has_a_row_for_each_run_of_units(
    rules: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    arguments = job(**NOT_ALL_FIT, rules=rules)
    units = planned(arguments)["units"]
    assert main(["plan", *arguments, "--units"]) == 0
    shown = capsys.readouterr().out
    header, *rows = shown[shown.index("\nunits ") + 1 :].split("\n\nPaste")[0].splitlines()
    if "more rows" in rows[-1]:
        assert len(rows[:-1]) == MAX_ROWS
        rows, units = rows[:-1], units[: int(rows[-2][: header.index("layers")].split()[-1]) + 1]
    assert header.split() == ["units", "layers", "parameters", "placement", "rule"]
    position = 0
    for row in rows:
        numbers = row[: header.index("layers")].split()
        first, last = int(numbers[0]), int(numbers[-1])
        assert first == position, "the rows cover all units in order"
        position = last + 1
        assert {unit["placement"] for unit in units[first : last + 1]} == {row[header.index("placement") :].split()[0]}
        assert row.rstrip().endswith(units[first]["rule"] or units[first]["placement"])
        numel = sum(unit["numel"] for unit in units[first : last + 1])
        assert f" {numel / 1e6:,.1f} M " in row
    assert position == len(units)


@pytest.mark.parametrize(
    "given",
    [{}, {"unit_size": 30_000_000}, {"sub_group_size": 500_000_000}, {"gpu_memory_gb": 60}],
)
def test_the_block_to_paste_has_only_the_limits_that_were_given(given: dict[str, int], rules: Path) -> None:
    options = {"model": MODEL, "world_size": 1, "ranks_per_node": 1, "rules": rules, **given}
    found = planned(job(**options))
    config = found["deepspeed_config"]
    block = config["deep_optimizer_states"]
    assert block.pop("placement") == RULES
    assert config["zero_optimization"].get("sub_group_size") == given.get("sub_group_size")
    if "gpu_memory_gb" in given:
        # The optimizer's part of the GPU's memory.
        assert 0 < block.pop("gpu_memory_gb") < given["gpu_memory_gb"]
    assert block == {key: value for key, value in given.items() if key == "unit_size"}


def test_a_block_that_leaves_nothing_to_the_planner_gives_the_printed_plan(tmp_path: Path) -> None:
    found = planned(job(**NOT_ALL_FIT, rules=write(tmp_path, EVERYTHING_FIXED)))
    config = config_of(found)
    plan = config.plan(config.workload(sub_groups()))
    assert [placement.value for placement in plan.placements] == [unit["placement"] for unit in found["units"]]
    assert [unit.numel for unit in plan.workload.units] == [unit["numel"] for unit in found["units"]]
    assert found["deepspeed_config"]["deep_optimizer_states"]["num_slots"] == plan.num_slots
    assert "gpu_memory_gb" not in found["deepspeed_config"]["deep_optimizer_states"]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"match": "*"}, "placement: must be a list of rules, found {'match': '*'}"),
        ([{"match": "*", "states": "gpu"}], "placement[0].states: must be "),
        ([{"match": "lm_heads.*", "states": "cpu"}], "nearest names: lm_head"),
        ([RULES[2], RULES[0]], "all taken by rule '*'"),
    ],
)
def test_rules_that_cannot_be_used_are_refused(
    rules: object, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, rules)
    assert main(["plan", *job(model=MODEL, rules=path)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"--rules {path}: placement")
    assert expected in message


def test_a_rule_for_the_head_of_a_model_with_tied_embeddings_is_refused_with_the_name_that_counts(
    rules: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *job(model="13B", rules=rules)]) == 2
    assert '"lm_head.weight", another name of "model.embed_tokens.weight"' in capsys.readouterr().err
