"""A training run's memory, windows and utilisation, against the papers' own figures and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perf_model.job import Job
from perf_model.model import ModelError, gpt
from perf_model.presets.machines import MACHINES
from perf_model.presets.models import MODELS
from tests.model.profiles import RATES, profile

GPT_175B = gpt("GPT-3", layers=96, hidden=12288, heads=96, vocab=51200, positions=2048)
JOB = Job(shape=GPT_175B, world_size=1024, ranks_per_node=8, micro_batch=1, sequence=2048)


def test_the_megatron_paper_s_training_time() -> None:
    """arXiv 2104.04473, equation 4: 8 T P / (n X) seconds; its example is 34 days for T = 300 B, X = 140 TFLOP/s."""
    tokens, flops = 300e9, 140e12
    iteration_s = JOB.forward_s(flops) + JOB.backward_s(flops)
    training_s = iteration_s * tokens / JOB.tokens
    assert training_s == pytest.approx(8 * tokens * GPT_175B.numel / (JOB.world_size * flops), rel=0.05)
    assert training_s / 86400 == pytest.approx(34, rel=0.05)
    kept = replace(JOB, recompute=False)
    assert kept.forward_s(flops) + kept.backward_s(flops) == pytest.approx(iteration_s * 6 / 8, rel=0.01)


def test_utilisation_counts_no_recomputation() -> None:
    iteration_s = JOB.forward_s(140e12) + JOB.backward_s(140e12)
    assert JOB.mfu(iteration_s, 312e12) == pytest.approx(140 / 312 * 6 / 8, rel=0.01)
    assert replace(JOB, recompute=False).mfu(iteration_s, 312e12) == JOB.mfu(iteration_s, 312e12)


def test_memory_beside_the_optimizer_by_hand() -> None:
    shape = gpt("small", layers=2, hidden=1024, heads=8, vocab=1000, positions=0)
    job = Job(shape=shape, world_size=2, ranks_per_node=2, micro_batch=3, sequence=100)
    numel, tokens = shape.numel, 300
    parameters = 2 * -(-numel // 2) + 2 * numel + 2 * numel
    activations = 34 * tokens * 1024 + 2 * 2 * tokens * 1024 + 10 * tokens * 1000
    assert job.gpu_bytes == 2**30 + parameters + activations
    kept = replace(job, recompute=False)
    assert kept.gpu_bytes - job.gpu_bytes == 34 * tokens * 1024 - 2 * 2 * tokens * 1024
    alone = replace(job, world_size=1)
    assert alone.ranks_of_a_node == 1
    assert alone.gpu_bytes == 2**30 + 2 * numel + 2 * numel + activations, "one rank gathers nothing"


def test_gradients_pass_to_host_memory() -> None:
    assert JOB.gradients_s(10**9, profile()) == pytest.approx(6e9 / RATES["d2h_bytes_per_s"])
    waived = {name: None if "h2d" in name or "d2h" in name or "both" in name else rate for name, rate in RATES.items()}
    assert JOB.gradients_s(10**9, profile(waived)) == 0.0


@pytest.mark.parametrize("key", ["world_size", "ranks_per_node", "micro_batch", "sequence"])
def test_impossible_jobs_are_refused(key: str) -> None:
    with pytest.raises(ModelError, match=f"{key}: must be at least 1, found 0"):
        replace(JOB, **{key: 0})


def test_presets_have_the_published_numbers_of_parameters() -> None:
    published = {"7B": 5.92e9, "8.3B": 9.14e9, "10B": 9.92e9, "13B": 11.25e9, "20B": 15.33e9}
    for name, numel in published.items():
        assert MODELS[name].numel == pytest.approx(numel, rel=1e-3)
    exact = {"Llama-3-8B": 8_030_261_248, "Qwen2.5-7B": 7_615_616_512, "Llama-3-70B": 70_553_706_496}
    for name, numel in exact.items():
        assert MODELS[name].numel == numel


@pytest.mark.parametrize("name", MACHINES)
def test_machines_say_that_they_are_not_measured_and_divide_what_is_shared(name: str) -> None:
    alone, four = (MACHINES[name].profile(ranks) for ranks in (1, 4))
    assert alone.provenance.source.startswith("PRESET, not a measurement of your machine")
    for shared in ("cpu_adam_params_per_s", "dram_update_bytes_per_s"):
        assert four.rate(shared) == pytest.approx(alone.rate(shared) / 4)
    for own in ("h2d_bytes_per_s", "gpu_adam_params_per_s", "matmul_flops_per_s"):
        assert four.rate(own) == alone.rate(own)
