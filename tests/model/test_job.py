"""Test training runs: shapes of models, the time of forward and backward, and what a forecast takes and hides."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.prediction.hardware import ACCELERATOR_RATES
from perf_model.presets.machines import MACHINES
from perf_model.presets.models import MODELS
from perf_model.schedule.placement import Placement
from perf_model.training_run.decoder import MAX_PARAMETERS, MIN_PARAMETERS, generic_model, gpt
from perf_model.training_run.forecast import Forecast, MemoryLimits, Overlap, PredictedIteration
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import (
    NEAREST_HOST,
    NO_OVERHEADS,
    TRAINING_SHARE,
    GradientPath,
    Network,
    Overheads,
    PhaseRates,
    training_flops_per_s,
)
from perf_model.training_run.model import ModelError
from tests.model.profiles import CPU_ONLY, RATES, profile


@given(st.integers(MIN_PARAMETERS, MAX_PARAMETERS) | st.integers(MIN_PARAMETERS, 10**10))
def test_a_generic_model_has_exactly_the_number_of_parameters(numel: int) -> None:
    shape = generic_model(numel)
    assert shape.numel == shape.active_numel == numel
    looked_up = 0 if shape.tied else shape.vocab * shape.hidden
    assert shape.multiplied_numel + looked_up == pytest.approx(numel, rel=0.01)


PRESET = MODELS["7B"]
LAYERS, PATH = 32, "model.layers"


@pytest.mark.parametrize("every", [1, 3])
def test_shared_layers_have_the_parameters_of_some_layers_and_the_operations_of_all(every: int) -> None:
    shared = PRESET.share_layers(PATH, every)
    layer_numel = sum(tensor.numel for tensor in PRESET.tensors if tensor.name.startswith(f"{PATH}.0."))
    assert shared.numel == PRESET.numel - (LAYERS - every) * layer_numel
    assert shared.layers == PRESET.layers
    for recompute in (True, False):
        assert shared.iteration_flops(2, 2048, recompute) == PRESET.iteration_flops(2, 2048, recompute)
    # Forward uses the parameters of layer i % every in place of layer i's.
    number = re.compile(rf"(?<=^{PATH}\.)\d+")
    expected = [number.sub(lambda match: str(int(match[0]) % every), name) for name in PRESET.uses()]
    assert shared.uses() == expected
    assert shared.first_use() == list(dict.fromkeys(expected))
    assert sorted(tensor.name for tensor in shared.tensors) == sorted(set(expected))


@pytest.mark.parametrize(
    ("change", "path", "every", "message"),
    [
        ({}, "model.layer", 1, "--share-layers: must name a list of layers, found 'model.layer', which is none."),
        ({}, PATH, 0, "--every: must be at least 1 and less than the number of layers, 32, found 0"),
        ({}, PATH, LAYERS, "--every: must be at least 1 and less than the number of layers, 32, found 32"),
        ({"numel": 1}, PATH, 1, "must name layers with equal parameters, found model.layers.1"),
        ({"name": f"{PATH}.1.new.weight"}, PATH, 1, "must name layers with equal parameters, found model.layers.1"),
    ],
)
def test_layers_that_cannot_share_are_refused(change: dict[str, Any], path: str, every: int, message: str) -> None:
    index = next(index for index, tensor in enumerate(PRESET.tensors) if tensor.name.startswith(f"{PATH}.1."))
    changed = PRESET.tensors[index]._replace(**change)
    model = replace(PRESET, tensors=(*PRESET.tensors[:index], changed, *PRESET.tensors[index + 1 :]))
    with pytest.raises(ModelError, match=re.escape(message)):
        model.share_layers(path, every)


NETWORK = Network(
    ranks_per_node=8, all_gather_bytes_per_s=200e9, reduce_scatter_bytes_per_s=160e9, inter_node_bytes_per_s=10e9
)


@pytest.mark.parametrize(
    ("network", "ranks", "sent_bytes", "all_gather_rate", "reduce_scatter_rate"),
    [
        # The ranks of a node pass on all parts but one.
        (NETWORK, 4, 6e9, 200e9, 160e9),
        # 15 of 16 parts leave each node, over the connections of 8 ranks, and 7 of 8 are passed on in it.
        (NETWORK, 16, 7.5e9, 80e9, 80e9),
        (replace(NETWORK, inter_node_bytes_per_s=100e9), 16, 7.5e9, 200e9, 160e9),
    ],
)
def test_the_slower_of_both_connections_determines_the_time_of_a_collective(
    network: Network, ranks: int, sent_bytes: float, all_gather_rate: float, reduce_scatter_rate: float
) -> None:
    assert network.all_gather_s(8e9, ranks) == pytest.approx(sent_bytes / all_gather_rate)
    assert network.reduce_scatter_s(8e9, ranks) == pytest.approx(sent_bytes / reduce_scatter_rate)


JOB = Job(shape=PRESET, world_size=16, ranks_per_node=8, micro_batch=1, sequence=2048)
GPU = profile({**RATES, "matmul_flops_per_s": 1e14 / TRAINING_SHARE})
ALONE = PhaseRates(flops_per_s=1e14, network=Network(ranks_per_node=8))


def test_training_runs_at_the_measured_rate_at_a_share_of_the_products_rate_or_as_published_runs() -> None:
    assert training_flops_per_s(GPU) == pytest.approx(1e14)
    assert training_flops_per_s(profile({**RATES, "training_flops_per_s": 2e14})) == 2e14
    preset = MACHINES["h100-pcie5"]
    assert training_flops_per_s(preset.profile(ranks=4)) == pytest.approx(preset.matmul_flops)
    cpu = profile({**RATES, **dict.fromkeys(ACCELERATOR_RATES), "matmul_flops_per_s": 1e13})
    assert training_flops_per_s(replace(cpu, gpu_memory_bytes=None)) == 1e13


def test_seconds_of_the_host_are_of_the_profile_or_of_our_machines_and_each_arm_adds_its_own() -> None:
    modules = {f"module_{name}_s": 1e-3 for name in ("forward", "backward", "gradients", "step")}
    measured = Overheads.from_profile(profile({**RATES, **modules}))
    assert (measured.forward_s, measured.step_s) == (1e-3, 1e-3)
    assert measured.source.startswith("the profile, but hooks and the slowdown by updates are of our runs")
    assert Overheads.from_profile(GPU) == NEAREST_HOST
    assert Overheads.from_profile(CPU_ONLY) == replace(NO_OVERHEADS, source="the profile")
    host = Overheads(forward_s=1e-3, backward_s=2e-3, gradients_s=3e-3, hooks_s=4e-3)
    assert (host.of_plugin.forward_s, host.of_plugin.backward_s) == (5e-3, 2e-3)
    assert (host.of_stock.forward_s, host.of_stock.backward_s) == (1e-3, 5e-3)


MODULES = 2 + 32 * 11 + 2
"""The model and its list of layers, 11 modules per layer, a norm and a table."""

GATHER_S = 2 * PRESET.numel * 15 / 16 / 8e8
SLOW_HOST = replace(ALONE, overheads=Overheads(forward_s=0.1, backward_s=0.2))
SLOW_NETWORK = replace(ALONE, network=Network(ranks_per_node=8, inter_node_bytes_per_s=1e8))
OFFLOADED = replace(JOB, world_size=1, ranks_per_node=1, offload_param=True)


@pytest.mark.parametrize(
    ("job", "rates", "forward_s", "backward_s"),
    [
        (JOB, ALONE, JOB.work.forward_flops / 1e14, JOB.work.backward_flops / 1e14),
        # With recomputation, backward also launches the modules of forward.
        (JOB, SLOW_HOST, MODULES * 0.1, MODULES * 0.3),
        (replace(JOB, recompute=False), SLOW_HOST, MODULES * 0.1, MODULES * 0.2),
        # One gather in each, and one reduction of as many bytes, or of the trainable parameters' bytes.
        (JOB, SLOW_NETWORK, GATHER_S, 2 * GATHER_S),
        (replace(JOB, trainable_share=0.01), SLOW_NETWORK, GATHER_S, 1.01 * GATHER_S),
        # Offloaded parameters are uploaded for each gather.
        (OFFLOADED, replace(ALONE, h2d_bytes_per_s=1e9), 2 * PRESET.numel / 1e9, 2 * PRESET.numel / 1e9),
    ],
)
def test_the_slowest_part_takes_the_time(job: Job, rates: PhaseRates, forward_s: float, backward_s: float) -> None:
    assert job.work.forward_s(rates) == pytest.approx(forward_s)
    assert job.work.backward_s(rates) == pytest.approx(backward_s)


def test_training_time_and_utilisation_are_as_in_the_megatron_paper() -> None:
    """Check section 5.1 of arXiv 2104.04473: 34 days for 300 B tokens on 1024 GPUs with 140 TFLOP/s each."""
    shape = gpt("GPT-3", layers=96, hidden=12288, heads=96, vocab=51200, positions=2048)
    job = Job(shape=shape, world_size=1024, ranks_per_node=8, micro_batch=1, sequence=2048)
    kept = replace(job, recompute=False)
    iteration_s, kept_s = ((each.work.forward_flops + each.work.backward_flops) / 140e12 for each in (job, kept))
    assert iteration_s * 300e9 / job.tokens / 86400 == pytest.approx(34, rel=0.05)
    assert kept_s == pytest.approx(iteration_s * 6 / 8, rel=0.01)
    # Utilisation does not count recomputation.
    assert job.mfu(iteration_s, 312e12) == kept.mfu(iteration_s, 312e12) == pytest.approx(140 / 312 * 6 / 8, rel=0.01)


@pytest.mark.parametrize("key", ["world_size", "ranks_per_node", "micro_batch", "sequence", "trainable_share"])
@pytest.mark.parametrize("value", [0, -1, 10**20, 1.5, float("nan")])
def test_impossible_jobs_are_refused(key: str, value: float) -> None:
    with pytest.raises(ModelError, match=f"{key}: must be .*, found {value}\\.\nCorrect --"):
        replace(JOB, **{key: value})


SMALL = Job(shape=MODELS["7B"], world_size=4, ranks_per_node=4, micro_batch=1, sequence=256, recompute=False)
"""A job with sequences so short that copying the gradients takes longer than the arithmetic of backward."""

QUICK_HOST = {"module_forward_s": 1e-5, "module_backward_s": 1e-5, "module_gradients_s": 0.0, "module_step_s": 0.0}
WITH_GPU = profile({**RATES, **QUICK_HOST, "matmul_flops_per_s": 1e15})


def test_backward_is_charged_for_the_gradients_of_each_placement() -> None:
    found = Forecast(SMALL, WITH_GPU, MemoryLimits(gpu=39 * 10**9, host=None), Overlap(), [100_000_000])
    plan = found.planned.plan
    numel = plan.workload.numel
    assert 0 < plan.numel(Placement.RESIDENT) < numel
    d2h, h2d = RATES["d2h_bytes_per_s"], RATES["h2d_bytes_per_s"]
    assert GradientPath.for_plan(plan) == GradientPath(down_bytes=2 * plan.numel(Placement.CPU))
    compute_s = SMALL.work.backward_flops / (TRAINING_SHARE * 1e15)
    assert found.predicted.backward_s == pytest.approx(max(2 * plan.numel(Placement.CPU) / d2h, compute_s))
    iterations = {name: outcome for name, outcome in found.baselines.items() if isinstance(outcome, PredictedIteration)}
    assert set(iterations) >= {"stock", "twin_flow", "all_cpu", "all_streamed", "stride_2"}
    assert iterations["stock"].backward_s == pytest.approx(6 * numel / d2h + 2 * numel / h2d)
    assert iterations["all_cpu"].backward_s == pytest.approx(2 * numel / d2h)
    assert iterations["all_streamed"].backward_s == pytest.approx(compute_s)
    assert iterations["all_cpu"].backward_s < iterations["twin_flow"].backward_s < iterations["stock"].backward_s
    kept = found.baselines["no_offload"]
    if isinstance(kept, PredictedIteration):
        assert kept.backward_s == pytest.approx(compute_s), "no gradient is copied"
