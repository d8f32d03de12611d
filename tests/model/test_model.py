"""Test the shapes of models: counted as in the papers, of --params, and with layers that share their parameters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.__main__ import main
from perf_model.presets.models import MODELS
from perf_model.training_run.decoder import MAX_PARAMETERS, MIN_PARAMETERS, generic_model, gpt
from perf_model.training_run.job import MAX_REUSE_DISTANCE, Job
from perf_model.training_run.model import ModelError, ModelShape
from perf_model.training_run.training_memory import TrainingMemory
from tests.cli.planning import LLAMA, job, planned
from tests.cluster.paper_formulas import gpt_iteration_flops, gpt_numel

# Megatron-LM, arXiv 2104.04473


@given(st.integers(1, 100), st.integers(1, 100), st.integers(1000, 60_000), st.integers(1, 512), st.integers(64, 4096))
def test_gpt_shapes_give_the_papers_numbers(layers: int, heads: int, vocab: int, batch: int, sequence: int) -> None:
    hidden = 64 * heads
    shape = gpt("GPT", layers, hidden, heads, vocab, sequence)
    numel = gpt_numel(layers, hidden, vocab, sequence)
    flops = gpt_iteration_flops(layers, hidden, vocab, sequence, batch)
    # The formula of the paper leaves out the last normalisation, which has 2 * hidden parameters.
    assert shape.numel - 2 * hidden == pytest.approx(numel, rel=1e-9)
    assert shape.iteration_flops(batch, sequence, recompute=True) == pytest.approx(flops, rel=1e-9)


def test_without_recomputation_the_layers_count_three_times_instead_of_four() -> None:
    shape = gpt("GPT", 24, 2048, 16, 51200, 1024)
    logits = 2 * 8 * 1024 * 2048 * 51200
    with_it, without = (shape.iteration_flops(8, 1024, recompute) for recompute in (True, False))
    assert (with_it - 3 * logits) / (without - 3 * logits) == pytest.approx(4 / 3)
    assert without == 3 * shape.forward_flops(8, 1024)


@given(st.integers(MIN_PARAMETERS, MAX_PARAMETERS) | st.integers(MIN_PARAMETERS, 10**10))
def test_a_generic_model_has_exactly_the_number_of_parameters(numel: int) -> None:
    shape = generic_model(numel)
    assert shape.numel == shape.active_numel == numel
    looked_up = 0 if shape.tied else shape.vocab * shape.hidden
    assert shape.multiplied_numel + looked_up == pytest.approx(numel, rel=0.01)


@given(st.integers(10**9, 10**12), st.none() | st.integers(1, 2_000), st.none() | st.integers(1, 10**5))
def test_layers_and_width_of_a_generic_model_are_those_that_are_given(
    numel: int, layers: int | None, hidden: int | None
) -> None:
    try:
        shape = generic_model(numel, layers, hidden)
    except ModelError:
        return
    assert shape.numel == numel
    assert shape.layers == (layers or shape.layers)
    assert shape.hidden == (hidden or shape.hidden)


@pytest.mark.parametrize(("numel", "layers", "hidden"), [(8.03e9, 32, 4096), (70.6e9, 80, 8192), (405.9e9, 126, 16384)])
def test_default_widths_are_close_to_those_of_llama_3(numel: float, layers: int, hidden: int) -> None:
    shape = generic_model(int(numel))
    assert shape.layers == pytest.approx(layers, rel=0.15)
    assert shape.hidden == pytest.approx(hidden, rel=0.15)


@pytest.mark.parametrize("numel", [1e8, 2e8, 1e9, 7e9, 32e9, 32.8e9, 1e12])
def test_eight_tensor_parallel_ranks_can_divide_the_heads(numel: float) -> None:
    shape = generic_model(int(numel))
    assert shape.heads % 8 == 0
    assert shape.kv_heads % 8 == 0


def test_plan_states_the_widths_that_are_assumed_for_params(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", *job()[:2], "--params", "32e9", *job()[4:], "--unit-size", "1000000000"]
    assert main([*arguments, "--host-memory-gb", "900"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "32B (32.00 B parameters) on 4 x H100-80GB" in shown
    assert "model: a generic dense model with 55 layers of width 7,168, feed-forwards of 20,039" in shown
    assert main([*arguments, "--layers", "64", "--hidden", "5120", "--host-memory-gb", "900"]) == 0
    assert "64 layers of width 5,120" in " ".join(capsys.readouterr().out.split())


PRESET = MODELS["7B"]


LAYERS, PATH = 32, "model.layers"


def layer_numel(shape: ModelShape) -> int:
    """Return the parameters of the first layer."""
    return sum(tensor.numel for tensor in shape.tensors if tensor.name.startswith(f"{PATH}.0."))


@pytest.mark.parametrize("every", [1, 3, 31])
def test_shared_layers_have_the_parameters_of_some_layers_and_the_operations_of_all(every: int) -> None:
    shared = PRESET.share_layers(PATH, every)
    assert shared.numel == PRESET.numel - (LAYERS - every) * layer_numel(PRESET)
    assert shared.layers == PRESET.layers
    for recompute in (True, False):
        assert shared.iteration_flops(2, 2048, recompute) == PRESET.iteration_flops(2, 2048, recompute)
    # Forward uses the parameters of layer i % every in the places of those of layer i.
    own = [tensor.name for tensor in shared.tensors]
    expected = []
    for name in PRESET.uses():
        if name.startswith(f"{PATH}."):
            index, rest = name[len(PATH) + 1 :].split(".", 1)
            name = f"{PATH}.{int(index) % every}.{rest}"
        expected.append(name)
    assert shared.uses() == expected
    assert shared.first_use() == list(dict.fromkeys(expected))
    assert sorted(own) == sorted(set(expected))


@pytest.mark.parametrize(
    ("path", "every", "message"),
    [
        ("model.layer", 1, "--share-layers: must name a list of layers, found 'model.layer', which is none."),
        (PATH, 0, "--every: must be at least 1 and less than the number of layers, 32, found 0"),
        (PATH, LAYERS, "--every: must be at least 1 and less than the number of layers, 32, found 32"),
    ],
)
def test_layers_that_cannot_share_are_refused_with_rule_value_and_remedy(path: str, every: int, message: str) -> None:
    with pytest.raises(ModelError) as error:
        PRESET.share_layers(path, every)
    assert message in str(error.value)


def test_layers_of_different_sizes_cannot_share() -> None:
    """Use a model whose second layer has one more parameter in a matrix, and one whose third has no bias."""
    index = next(index for index, tensor in enumerate(PRESET.tensors) if tensor.name.startswith(f"{PATH}.1."))
    longer = PRESET.tensors[index]._replace(numel=PRESET.tensors[index].numel + 1)
    for tensors in (
        (*PRESET.tensors[:index], longer, *PRESET.tensors[index + 1 :]),
        (*PRESET.tensors[:index], longer._replace(name=f"{PATH}.1.new.weight"), *PRESET.tensors[index:]),
    ):
        with pytest.raises(ModelError, match=r"must name layers with equal parameters, found model\.layers\.1"):
            replace(PRESET, tensors=tensors).share_layers(PATH, 1)


def a_job(shape: ModelShape, **changes: object) -> Job:
    return Job(shape=shape, world_size=8, ranks_per_node=8, micro_batch=1, sequence=2048, **changes)  # type: ignore[arg-type]


def test_memory_is_that_of_the_parameters_of_one_layer_and_the_activations_of_all() -> None:
    own, shared = a_job(PRESET), a_job(PRESET.share_layers(PATH, 1))
    assert TrainingMemory(shared).activation_bytes == TrainingMemory(own).activation_bytes
    assert TrainingMemory(shared).partition_bytes < TrainingMemory(own).partition_bytes / 10
    assert shared.workload(10**8).numel < own.workload(10**8).numel / 10
    # Without recomputation, the gradients of all shared parameters exist beside the activations of almost all layers.
    kept, kept_own = (TrainingMemory(a_job(shape, recompute=False)) for shape in (PRESET.share_layers(PATH, 1), PRESET))
    gradients_bytes = 2 * layer_numel(PRESET)
    assert (kept.in_feed_forward(LAYERS - 1), gradients_bytes) in kept.moments
    assert (kept_own.in_feed_forward(LAYERS - 1), gradients_bytes) not in kept_own.moments


@pytest.mark.parametrize(("every", "passes"), [(1, 1), (4, 1), (8, 4)])
def test_layers_stay_gathered_between_their_uses_up_to_the_reuse_distance_of_deepspeed(every: int, passes: int) -> None:
    shape = PRESET.share_layers(PATH, every)
    assert (every * layer_numel(PRESET) > MAX_REUSE_DISTANCE) == (passes > 1)
    others = PRESET.numel - LAYERS * layer_numel(PRESET)
    work = a_job(shape).work
    assert work.gathered_bytes == 2 * (others + passes * every * layer_numel(PRESET))
    assert work.reduced_bytes == 2 * shape.numel
    assert work.forward_flops == a_job(PRESET).work.forward_flops


def test_the_command_plans_for_shared_layers(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**LLAMA, "num_hidden_layers": 8}))
    own = planned(job(model=config))
    shared = planned(job(model=config, share_layers=PATH, every=2))
    own_numel, numel = (found["inputs"]["model"]["numel"] for found in (own, shared))
    tables = 2 * 128256 * 4096 + 4096
    assert numel - tables == (own_numel - tables) / 4
    assert sum(unit["numel"] for unit in shared["units"]) == pytest.approx(numel / 4, rel=1e-6)
    assert shared["predicted"]["forward_s"] == own["predicted"]["forward_s"]
    assert {unit["label"].split(" (")[0] for unit in shared["units"]} <= {
        f"{first}{last}"
        for first in ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
        for last in ("", *(f" to {end}" for end in ("model.layers.0", "model.layers.1", "model.norm", "lm_head")))
    }
    assert sum(unit["forward_numel"] for unit in shared["units"]) == pytest.approx(
        sum(unit["numel"] for unit in own["units"]), rel=1e-3
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 2}, "--every: must come with --share-layers, found 2 alone.\nGive both, or neither."),
        ({"share_layers": "blocks"}, "The model has model.layers."),
        ({"share_layers": PATH, "every": 99}, "less than the number of layers"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *job("h100", "7B", **options)]) == 2
    assert message in capsys.readouterr().err
