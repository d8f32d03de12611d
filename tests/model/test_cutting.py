"""Test how sub-groups are formed and cut into units: nothing is lost, rules are kept apart, layers stay whole."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.presets.models import MODELS
from perf_model.schedule.cutting import BORDER_MULTIPLE, PIECE_MULTIPLE, cut_into_units, layer_of
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import ALIGNMENT, Partition, Unit, Workload, form_sub_groups
from perf_model.training_run.decoder import gpt
from perf_model.training_run.model import ModelShape

NAMES = ("embed.weight", "layers.0.q", "layers.0.mlp.up", "layers.1.q", "layers.1.mlp.experts.3.up", "norm.weight", "x")

aligned = st.integers(1, 5000 // BORDER_MULTIPLE).map(lambda count: BORDER_MULTIPLE * count)
"""Lengths with which every parameter begins where a unit may begin."""

partitions = st.builds(Partition, st.sampled_from(NAMES), aligned)
unaligned_partitions = st.builds(Partition, st.sampled_from(NAMES), st.integers(1, 5000))
groups_of_partitions = st.lists(st.lists(partitions, min_size=1, max_size=12), min_size=1, max_size=4)
unaligned_groups = st.lists(st.lists(unaligned_partitions, min_size=1, max_size=12), min_size=1, max_size=4)
unit_sizes = st.integers(1, 20_000)


def length(group: Sequence[Partition]) -> int:
    return sum(partition.numel for partition in group)


def numel_by_name(unit: Unit, groups: Sequence[Sequence[Partition]]) -> Counter[str]:
    """Return how many elements ``unit`` has of each parameter."""
    found = Counter[str]()
    for run in unit.ranges:
        begin = 0
        for partition in groups[run.sub_group]:
            found[partition.name] += max(0, min(run.end, begin + partition.numel) - max(run.begin, begin))
            begin += partition.numel
    return +found


def numel_by_layer(unit: Unit, groups: Sequence[Sequence[Partition]]) -> Counter[str]:
    found = Counter[str]()
    for name, numel in numel_by_name(unit, groups).items():
        found[layer_of(name)] += numel
    return found


def test_sub_groups_of_one_layer_share_a_unit_while_they_fit() -> None:
    names = [f"layers.{layer}.{name}" for layer in range(2) for name in "qkvo"]
    groups = form_sub_groups([Partition(name, 1000) for name in names], 0)
    for size, numels in {4000: [4000, 4000], 3500: [3000, 1000] * 2, 999: [512, 488] * 8}.items():
        workload = cut_into_units(groups, size)
        check_tiles(workload, groups)
        assert [unit.numel for unit in workload.units] == numels


def check_tiles(workload: Workload, groups: Sequence[Sequence[Partition]]) -> None:
    """Check that the units of each sub-group follow one another from its first to its last element."""
    assert [unit.index for unit in workload.units] == list(range(len(workload.units)))
    assert workload.sub_group_numels == tuple(map(length, groups))
    for index, group in enumerate(groups):
        of_group = [run for unit in workload.units for run in unit.ranges if run.sub_group == index]
        of_group.sort(key=lambda run: run.begin)
        assert of_group[0].begin == 0
        assert of_group[-1].end == length(group)
        assert all(before.end == after.begin for before, after in pairwise(of_group))
        assert min(run.numel for run in of_group) > 0


@given(unaligned_groups, unit_sizes)
def test_units_tile_each_sub_group_and_are_no_longer_than_the_size(groups: list[list[Partition]], size: int) -> None:
    workload = cut_into_units(groups, size)
    check_tiles(workload, groups)
    longest = -(-size // PIECE_MULTIPLE) * PIECE_MULTIPLE
    assert max(unit.numel for unit in workload.units) < longest + BORDER_MULTIPLE
    assert all(run.begin % BORDER_MULTIPLE == 0 for unit in workload.units for run in unit.ranges)


@given(groups_of_partitions, unit_sizes, st.integers(2, 4))
def test_units_never_mix_parameters_of_different_placements(
    groups: list[list[Partition]], size: int, characters: int
) -> None:
    def placement_of(name: str) -> Placement | None:
        return [None, *Placement][len(name) % characters]

    workload = cut_into_units(groups, size, placement_of)
    check_tiles(workload, groups)
    for unit in workload.units:
        assert {placement_of(name) for name in numel_by_name(unit, groups)} == {unit.fixed}


@given(unaligned_groups, unit_sizes, st.randoms(use_true_random=False))
def test_persistent_parameters_are_the_first_unit_and_in_no_other(
    groups: list[list[Partition]], size: int, chance: random.Random
) -> None:
    groups = [[replace(partition, is_persistent=chance.random() < 0.4) for partition in group] for group in groups]
    workload = cut_into_units(groups, size)
    check_tiles(workload, groups)
    persistent = sum(partition.numel for group in groups for partition in group if partition.is_persistent)
    assert workload.persistent_unit == (0 if persistent > 0 else None)
    assert sum(unit.numel for unit in workload.units if unit.is_persistent) == persistent
    assert [unit.index for unit in workload.units if unit.is_persistent] == [0] * (persistent > 0)
    longest = -(-size // PIECE_MULTIPLE) * PIECE_MULTIPLE
    for unit in workload.units[1 if persistent > 0 else 0 :]:
        assert unit.numel < longest + BORDER_MULTIPLE
        assert (
            len({run.sub_group for run in unit.ranges}) == 1
            or len({layer_of(name) for name in numel_by_name(unit, groups)}) == 1
        )
    # In memory, ranges neither overlap nor lose their alignment.
    for unit in workload.units:
        placed = zip(unit.ranges, unit.offsets, strict=True)
        assert all((offset - run.begin) % ALIGNMENT == 0 for run, offset in placed)
        ends = [0, *(offset + run.numel for run, offset in zip(unit.ranges, unit.offsets, strict=True))]
        assert all(end <= offset for end, offset in zip(ends, unit.offsets, strict=False))
        assert unit.length == ends[-1]


@given(groups_of_partitions, unit_sizes)
def test_a_layer_that_fits_is_never_cut(groups: list[list[Partition]], size: int) -> None:
    workload = cut_into_units(groups, size)
    borders = {(run.sub_group, run.begin) for unit in workload.units for run in unit.ranges}
    for sub_group, group in enumerate(groups):
        begin = 0
        while group:
            layer = layer_of(group[0].name)
            count = next((i for i, partition in enumerate(group) if layer_of(partition.name) != layer), len(group))
            numel = length(group[:count])
            if numel <= size:
                assert not any((sub_group, begin + inside) in borders for inside in range(1, numel))
            begin += numel
            group = group[count:]


@given(st.lists(aligned, min_size=1, max_size=30), unit_sizes)
def test_whole_layers_share_a_unit_while_they_fit(numels: list[int], size: int) -> None:
    """Check that the first layer of each unit would not have fitted in the unit before."""
    group = [Partition(f"layers.{index}.w", numel) for index, numel in enumerate(numels)]
    units = cut_into_units([group], size).units
    for before, after in pairwise(units):
        if not after.label.endswith(")"):
            name = after.label.split(" to ")[0]
            first = numels[int(name.removeprefix("layers."))]
            assert before.label.endswith(")") or before.numel + first > size


def test_the_parts_of_a_layer_that_a_sub_group_cuts_are_units_of_their_own_unless_they_are_slivers() -> None:
    first = [Partition("layers.0.w", 100), Partition("layers.1.up", 60)]
    second = [Partition("layers.1.down", 40), Partition("layers.2.w", 100), Partition("layers.3.up", 97)]
    third = [Partition("layers.3.bias", 3), Partition("layers.4.w", 100)]
    units = cut_into_units([first, second, third], 1000).units
    assert [unit.label for unit in units] == [
        "layers.0",
        "layers.1",
        "layers.1",
        "layers.2 to layers.3",
        "layers.3 to layers.4",
    ]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3"),
        ("transformer.h.11.ln_1.bias", "transformer.h.11"),
        ("model.layers.3.mlp.experts.7.up_proj.weight", "model.layers.3"),
        ("lm_head.weight", "lm_head"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("weight", "weight"),
    ],
)
def test_the_layer_of_a_parameter_ends_at_the_first_number(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_units_are_labelled_with_their_layers() -> None:
    group = [Partition("embed.weight", 700), *(Partition(f"layers.{index}.w", 200) for index in range(4))]
    # Layer 0 begins at 700, and the next unit at the next multiple of 16. The last unit ends with the sub-group.
    assert [(unit.numel, unit.label) for unit in cut_into_units([group], 500).units] == [
        (512, "embed (1/2)"),
        (192, "embed (2/2)"),
        (400, "layers.0 to layers.1"),
        (396, "layers.2 to layers.3"),
    ]


def least_share_of_a_layer(shape: ModelShape, ranks: int, sub_group_size: int, unit_size: int) -> float:
    """Return the least share of a layer that lies in units of nothing else, or in one that has nearly all of it."""
    parts = [Partition(name, -(-numel // ranks)) for name, numel in shape.parameters()]
    groups = form_sub_groups(parts, sub_group_size)
    whole, inside = Counter[str](), Counter[str]()
    for part in parts:
        whole[layer_of(part.name)] += part.numel
    for unit in cut_into_units(groups, unit_size).units:
        by_layer = numel_by_layer(unit, groups)
        # A unit begins up to 15 elements after its first layer.
        by_layer = Counter({layer: numel for layer, numel in by_layer.items() if numel >= BORDER_MULTIPLE})
        for layer, numel in by_layer.items():
            if len(by_layer) == 1 or numel >= 0.95 * whole[layer]:
                inside[layer] += numel
    return min(inside[layer] / numel for layer, numel in whole.items() if layer.startswith("model.layers"))


@pytest.mark.parametrize("layers_per_unit", [1, 2.5, 4])
@pytest.mark.parametrize("sub_group_size", [100_000_000, 1_000_000_000])
@pytest.mark.parametrize(
    "shape",
    [MODELS["Llama-3-8B"], MODELS["Qwen2.5-7B"], MODELS["20B"], gpt("GPT-2", 48, 1600, 25, 50257, 1024)],
    ids=lambda shape: shape.name,
)
def test_nearly_all_of_a_layer_is_in_units_of_that_layer_or_of_whole_layers(
    shape: ModelShape, sub_group_size: int, layers_per_unit: float
) -> None:
    """Check published shapes on 1 to 8 ranks, with DeepSpeed's default of ``sub_group_size`` and a smaller one."""
    for ranks in (1, 2, 8):
        layer = sum(-(-numel // ranks) for name, numel in shape.parameters() if layer_of(name) == "model.layers.0")
        share = least_share_of_a_layer(shape, ranks, sub_group_size, int(layers_per_unit * layer))
        assert share >= 0.95


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 3000))
def test_a_sub_group_ends_with_the_parameter_that_reaches_the_size(numels: list[int], size: int) -> None:
    parts = [Partition(str(index), numel) for index, numel in enumerate(numels)]
    groups = form_sub_groups(parts, size)
    assert [part for group in groups for part in group] == parts
    for group in groups[:-1]:
        assert length(group) >= size
    for group in groups:
        assert length(group[:-1]) < size
