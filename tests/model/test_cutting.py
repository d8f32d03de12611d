"""Test how sub-groups are cut into units, of whole layers and of one placement, and the rules that place parameters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.schedule.cutting import BORDER_MULTIPLE, PIECE_MULTIPLE, cut_into_units, layer_of, partitions_in
from perf_model.schedule.placement import Placement
from perf_model.schedule.rules import PlacementRules, RulesError
from perf_model.schedule.workload import ALIGNMENT, Partition, Unit, form_sub_groups

CUT_NAMES = ("embed.weight", "layers.0.q", "layers.0.mlp.up", "layers.1.q", "layers.1.mlp.experts.3.up", "norm.weight")
CUT_NAMES += ("x",)
aligned = st.integers(1, 5000 // BORDER_MULTIPLE).map(lambda count: BORDER_MULTIPLE * count)
"""Lengths with which every parameter begins where a unit may begin."""


def groups_of(numels: st.SearchStrategy[int]) -> st.SearchStrategy[list[list[Partition]]]:
    is_persistent = st.sampled_from([False, False, True])
    partitions = st.builds(Partition, st.sampled_from(CUT_NAMES), numels, is_persistent=is_persistent)
    return st.lists(st.lists(partitions, min_size=1, max_size=12), min_size=1, max_size=4)


unit_sizes = st.integers(1, 20_000)


def placement_of(name: str) -> Placement | None:
    return [None, *Placement][len(name) % 4]


def length(group: Sequence[Partition]) -> int:
    return sum(partition.numel for partition in group)


def names_in(unit: Unit, groups: Sequence[Sequence[Partition]]) -> set[str]:
    return {partition.name for partition, _ in partitions_in(unit, groups)}


@given(groups_of(st.integers(1, 5000)), unit_sizes)
def test_units_tile_sub_groups_and_the_first_is_the_persistent_one(groups: list[list[Partition]], size: int) -> None:
    workload = cut_into_units(groups, size)
    assert [unit.index for unit in workload.units] == list(range(len(workload.units)))
    assert workload.sub_group_numels == tuple(map(length, groups))
    for index, group in enumerate(groups):
        runs = [run for unit in workload.units for run in unit.ranges if run.sub_group == index]
        runs.sort(key=lambda run: run.begin)
        assert [run.begin for run in runs] == [0, *(run.end for run in runs[:-1])]
        assert (runs[-1].end, min(run.numel for run in runs) > 0) == (length(group), True)
    persistent = sum(partition.numel for group in groups for partition in group if partition.is_persistent)
    assert workload.persistent_unit == (0 if persistent > 0 else None)
    assert sum(unit.numel for unit in workload.units if unit.is_persistent) == persistent
    longest = -(-size // PIECE_MULTIPLE) * PIECE_MULTIPLE
    for unit in workload.units:
        num_groups, num_layers = (
            len({run.sub_group for run in unit.ranges}),
            len({*map(layer_of, names_in(unit, groups))}),
        )
        assert unit.is_persistent or (unit.numel < longest + BORDER_MULTIPLE and 1 in (num_groups, num_layers))
        # In memory, ranges neither overlap nor lose their alignment.
        placed = list(zip(unit.ranges, unit.offsets, strict=True))
        assert all((offset - run.begin) % ALIGNMENT == 0 for run, offset in placed)
        ends = [0, *(offset + run.numel for run, offset in placed)]
        assert all(end <= offset for end, offset in zip(ends, unit.offsets, strict=False))
        assert unit.length == ends[-1]


@given(groups_of(aligned), unit_sizes)
def test_units_never_mix_parameters_of_different_placements(groups: list[list[Partition]], size: int) -> None:
    for unit in cut_into_units(groups, size, placement_of).units:
        assert unit.is_persistent or set(map(placement_of, names_in(unit, groups))) == {unit.fixed}


def test_sub_groups_of_one_layer_share_a_unit_while_they_fit() -> None:
    groups = form_sub_groups([Partition(f"layers.{layer}.{name}", 1000) for layer in range(2) for name in "qkvo"], 0)
    for size, numels in {4000: [4000, 4000], 3500: [3000, 1000] * 2, 999: [512, 488] * 8}.items():
        assert [unit.numel for unit in cut_into_units(groups, size).units] == numels


OF_A_LAYER = ("self_attn.q_proj", "mlp.gate", "mlp.experts.0.up_proj", "mlp.experts.1.up_proj", "input_layernorm")
OF_LAYERS = [f"model.layers.{layer}.{name}.weight" for layer in range(3) for name in OF_A_LAYER]
NAMES = ["model.embed_tokens.weight", *OF_LAYERS, "model.norm.weight", "lm_head.weight"]

EXAMPLE: list[dict[str, Any]] = [
    {"match": "*.mlp.experts.*", "states": "cpu"},
    {"match": ["lm_head.*", "*.embed_tokens.*"], "states": "resident"},
    {"match": "*", "states": "planned"},
]


def error_of(*entries: Any, frozen: tuple[str, ...] = (), aliases: dict[str, str] | None = None) -> str:
    with pytest.raises(RulesError) as caught:
        PlacementRules.from_json(list(entries)).check([name for name in NAMES if name not in frozen], frozen, aliases)
    first, *remedy = str(caught.value).splitlines()
    assert re.match(r"placement(\[\d+\](\.\w+)?)?: .*, found ", first)
    assert remedy
    return str(caught.value)


EXPERT_NAMES = tuple(name for name in NAMES if ".experts." in name)


@pytest.mark.parametrize(
    ("entries", "options", "expected"),
    [
        (["cpu"], {}, "placement[0]: must be an object if another entry is one, found 'cpu'.\nFor example: "),
        ([{"match": "*", "state": "cpu"}], {}, "is not a known key of a rule, found 'cpu'.\nDid you mean \"states\"?"),
        ([{"match": "*"}], {}, "placement[0].states: is required, found nothing.\n"),
        ([{"states": "cpu"}], {}, "placement[0].match: is required, found nothing.\n"),
        *(
            ([{"match": match, "states": "cpu"}], {}, f"must be a pattern or a list of patterns, found {match!r}.")
            for match in ([], [1], "")
        ),
        *(
            ([{"match": "*", "states": states}], {}, f"found {states!r}.\n{remedy}")
            for states, remedy in (
                ("stremed", 'Did you mean "streamed"?'),
                ("host", 'Did you mean "cpu"?'),
                ("cuda:0", 'Did you mean "resident", which keeps the states on the GPU, or "streamed", which '),
                ("elsewhere", 'With "planned", the planner chooses.'),
                ([], ""),
            )
        ),
        ([{"match": "mlp.gate$", "states": "cpu"}], {}, "Patterns are as in a shell, for whole names"),
        ([EXAMPLE[0], {"match": "LM_HEADS.*", "states": "cpu"}], {}, "found 'LM_HEADS.*'.\nThe nearest names: lm_head"),
        # The first rule that matches counts.
        ([EXAMPLE[2], EXAMPLE[0]], {}, "found '*.mlp.experts.*', whose parameters are all taken by rule '*'.\n"),
        (EXAMPLE, {"frozen": EXPERT_NAMES}, "found '*.mlp.experts.*', which matches only frozen parameters.\n"),
        (
            [{"match": "lm_head.bias", "states": "cpu"}],
            {"aliases": {"lm_head.bias": NAMES[0]}},
            f'"lm_head.bias", another name of "{NAMES[0]}".\n',
        ),
    ],
)
def test_rules_that_are_not_valid_are_refused(entries: list[Any], options: dict[str, Any], expected: str) -> None:
    assert expected in error_of(*entries, **options)
