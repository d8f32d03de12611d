"""Test rules by name: the first match places a parameter, units end where placements change, errors have a remedy."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.schedule.cutting import cut_into_units
from perf_model.schedule.placement import Placement
from perf_model.schedule.rules import PlacementRule, PlacementRules, RulesError, States, nearest_names
from perf_model.schedule.workload import Partition, Range

LAYERS, EXPERTS = 3, 2
NAMES = [
    "model.embed_tokens.weight",
    *(
        f"model.layers.{layer}.{name}"
        for layer in range(LAYERS)
        for name in (
            "self_attn.q_proj.weight",
            "mlp.gate.weight",
            *(f"mlp.experts.{expert}.up_proj.weight" for expert in range(EXPERTS)),
            "input_layernorm.weight",
        )
    ),
    "model.norm.weight",
    "lm_head.weight",
]
PATTERNS = ("*", "lm_head.*", "*.mlp.experts.*", "*.experts.1.*", "model.layers.[0-1].*", "*norm.weight", "*.LAYERS.*")

EXAMPLE: list[dict[str, Any]] = [
    {"match": "*.mlp.experts.*", "states": "cpu"},
    {"match": ["lm_head.*", "*.embed_tokens.*"], "states": "resident"},
    {"match": "*", "states": "planned"},
]


rules = st.lists(
    st.builds(
        PlacementRule,
        st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=2).map(tuple),
        st.sampled_from(get_args(States)),
    ),
    max_size=4,
).map(lambda chosen: PlacementRules(tuple(chosen)))


def error_of(*entries: Any, frozen: tuple[str, ...] = (), aliases: dict[str, str] | None = None) -> str:
    """Return the message of the error for these rules."""
    with pytest.raises(RulesError) as caught:
        PlacementRules.from_json(list(entries)).check([name for name in NAMES if name not in frozen], frozen, aliases)
    first, *remedy = str(caught.value).splitlines()
    assert re.match(r"placement(\[\d+\](\.\w+)?)?: .*, found ", first)
    assert remedy
    return str(caught.value)


@given(rules, st.sampled_from(NAMES))
def test_the_first_rule_that_matches_places_a_parameter(rules: PlacementRules, name: str) -> None:
    states = next(
        (rule.states for rule in rules.rules if any(fnmatchcase(name, pattern) for pattern in rule.match)), "planned"
    )
    assert rules.placement_of(name) is (None if states == "planned" else Placement(states))
    assert rules.may_plan or rules.placement_of(name) is not None


def test_units_end_at_the_next_border_after_a_change_of_the_placement_and_not_of_the_rule() -> None:
    rules = PlacementRules.from_json([{"match": "a.*", "states": "cpu"}, {"match": "b.*", "states": "cpu"}])
    workload = cut_into_units([[Partition(f"{name}.w", 20) for name in "abc"]], 100, rules.placement_of)
    assert [(unit.ranges, unit.label, unit.fixed) for unit in workload.units] == [
        ((Range(0, 0, 48),), "a to b", Placement.CPU),
        ((Range(0, 48, 12),), "c", None),
    ]


def test_the_example_places_experts_and_the_ends_of_the_model_and_leaves_the_rest_to_the_planner() -> None:
    rules = PlacementRules.from_json(EXAMPLE)
    rules.check(NAMES)
    placed = {name: rules.placement_of(name) for name in NAMES}
    assert {name for name in NAMES if placed[name] is Placement.CPU} == {name for name in NAMES if ".experts." in name}
    assert [name for name in NAMES if placed[name] is Placement.RESIDENT] == [NAMES[0], NAMES[-1]]
    assert placed["model.layers.1.mlp.gate.weight"] is None
    assert rules.may_plan
    assert rules.to_json() == EXAMPLE
    assert not PlacementRules.from_json([EXAMPLE[0], {"match": "*", "states": "streamed"}]).may_plan
    assert PlacementRules.from_json(EXAMPLE[:2]).may_plan, "the rest is planned"


@pytest.mark.parametrize("value", [None, {}, "cpu", [], 1])
def test_rules_must_be_a_list_with_an_entry(value: object) -> None:
    with pytest.raises(
        RulesError, match=re.escape(f"placement: must be a list of rules, found {value!r}.\nGive a list")
    ):
        PlacementRules.from_json(value)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("cpu", "placement[0]: must be an object if another entry is one, found 'cpu'.\nFor example: "),
        ({"match": "*", "state": "cpu"}, "is not a known key of a rule, found 'cpu'.\nDid you mean \"states\"?"),
        ({"match": "*", "states": "cpu", "x": 1}, "placement[0].x: is not a known key of a rule, found 1.\nA rule has"),
        ({"match": "*"}, "placement[0].states: is required, found nothing.\n"),
        ({"states": "cpu"}, "placement[0].match: is required, found nothing.\n"),
        ({"match": [], "states": "cpu"}, "placement[0].match: must be a pattern or a list of patterns, found []."),
        ({"match": [1], "states": "cpu"}, "placement[0].match: must be a pattern or a list of patterns, found [1]."),
        ({"match": "", "states": "cpu"}, "placement[0].match: must be a pattern or a list of patterns, found ''."),
        ({"match": "*", "states": "stream"}, "found 'stream'.\nDid you mean \"streamed\"?"),
        ({"match": "*", "states": "stremed"}, "found 'stremed'.\nDid you mean \"streamed\"?"),
        ({"match": "*", "states": "gpu_resident"}, "found 'gpu_resident'.\nDid you mean \"resident\"?"),
        ({"match": "*", "states": "host"}, "found 'host'.\nDid you mean \"cpu\"?"),
        ({"match": "*", "states": "auto"}, "found 'auto'.\nDid you mean \"planned\"?"),
        ({"match": "*", "states": "elsewhere"}, "found 'elsewhere'.\nWith \"planned\", the planner chooses."),
        ({"match": "*", "states": []}, "must be \"cpu\", \"streamed\", \"resident\" or \"planned\", found []."),
    ],
)  # fmt: skip
def test_a_rule_that_is_not_valid_is_refused(rule: object, expected: str) -> None:
    assert expected in error_of(rule)


@pytest.mark.parametrize("states", ["gpu", "GPU", "cuda", "cuda:0", "device", "on_gpu", "vram", "accelerator"])
def test_a_word_for_the_accelerator_is_answered_with_the_two_placements_on_it(states: str) -> None:
    assert error_of({"match": "*", "states": states}).endswith(
        'Did you mean "resident", which keeps the states on the GPU, or "streamed", which keeps them in host memory '
        "and copies them to the GPU for each update?"
    )


@pytest.mark.parametrize("expression", [r".*\.mlp\..*", r"^model\.layers\.\d+\.mlp\..+", "mlp.gate$"])
def test_a_regular_expression_is_answered_with_the_names_of_its_layer(expression: str) -> None:
    message = error_of({"match": expression, "states": "cpu"})
    assert message.endswith("Patterns are as in a shell, for whole names: * stands for any text.")
    assert "model.layers.0.mlp" in message


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names() -> None:
    message = error_of({"match": "lm_heads.*", "states": "resident"}, EXAMPLE[2])
    assert message.startswith("placement[0].match: must match a parameter of the model, found 'lm_heads.*'.\n")
    assert "The nearest names: lm_head" in message
    message = error_of(EXAMPLE[0], {"match": ["lm_head.*", "*.layer.0.*"], "states": "cpu"})
    assert "placement[1].match: must match a parameter of the model, found '*.layer.0.*'" in message
    assert "model.layers.0" in message
    assert "found 'LM_HEAD.*'" in error_of({"match": "LM_HEAD.*", "states": "cpu"}), "cases differ"


def test_the_nearest_names_are_of_different_layers_only_if_they_differ_in_more_than_numbers() -> None:
    assert nearest_names("*.mlp.expert.*", NAMES)[0] == "model.layers.0.mlp.experts.0.up_proj.weight"
    assert len(nearest_names("*.mlp.expert.*", NAMES)) == 3
    assert nearest_names("layers", ["layers.0.w", "layers.1.w"]) == ["layers.0", "layers.0.w"]


def test_a_rule_behind_one_that_takes_all_of_its_parameters_is_refused_with_the_name_of_that_rule() -> None:
    message = error_of(EXAMPLE[2], EXAMPLE[0])
    assert message.startswith(
        "placement[1].match: must match a parameter that no earlier rule matches, found '*.mlp.experts.*', whose "
        "parameters are all taken by rule '*'.\nThe first rule that matches counts. "
    )
    halves = [{"match": f"*.experts.{expert}.*", "states": "cpu"} for expert in range(EXPERTS)]
    message = error_of(*halves, {"match": "*.experts.*", "states": "streamed"})
    assert "rule '*.experts.0.*' and rule '*.experts.1.*'" in message


def test_equal_rules_are_refused_too() -> None:
    assert "taken by rule '*'" in error_of(EXAMPLE[2], EXAMPLE[2])


def test_a_rule_that_matches_only_frozen_parameters_is_refused_as_such() -> None:
    frozen = tuple(name for name in NAMES if ".experts." in name)
    message = error_of(*EXAMPLE, frozen=frozen)
    assert "found '*.mlp.experts.*', which matches only frozen parameters.\nFrozen parameters have no" in message
    rules = PlacementRules.from_json([{"match": ["*.mlp.experts.*", "lm_head.*"], "states": "cpu"}])
    rules.check([name for name in NAMES if name not in frozen], frozen)


def test_a_pattern_for_a_further_name_of_a_tied_parameter_is_refused_with_the_name_that_counts() -> None:
    tied = {"lm_head.bias": "model.embed_tokens.weight"}
    message = error_of({"match": "lm_head.bias", "states": "cpu"}, aliases=tied)
    assert '"lm_head.bias", another name of "model.embed_tokens.weight".' in message
    assert message.endswith('Match "model.embed_tokens.weight".')
