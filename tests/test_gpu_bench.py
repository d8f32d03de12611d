"""Check the benchmark ``gpu`` with a tiny model: its arms, their limits, and the rows that each arm leaves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import energy, rows_of
from benchmarks.gpu.arms import FSDP2, MODELS, OURS_EMPTY, TORCHAO, ArmJob, bits_jobs, ours_limited, timed_jobs
from benchmarks.gpu.processes import ArmOutcome, run_jobs
from benchmarks.harness.rows import BIT_IDENTICAL, COST, COST_SHARE, RETAINED, Results, Row, read_rows
from benchmarks.harness.variants import NO_OFFLOAD, STOCK, SUPER
from deep_opt_states.host import machine
from tests.launch import REPOSITORY

TINY_OURS = ours_limited(MODELS["tiny"]).name
ON_CPU, ON_SOFTWARE_GPU = "benchmarks.gpu.train", "tests.software_gpu.gpu_bench_ranks"


@pytest.fixture(autouse=True)
def one_core_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the arms train on the CPU accelerator, with one thread."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(machine, "cores", lambda: SimpleNamespace(usable=1))


def tiny(arm: str, *tokens: int) -> ArmJob:
    return ArmJob(arm=arm, model="tiny", tokens=tokens or (64,))


def outcomes_of(*jobs: ArmJob, limit_s: float = 200, program: str = ON_CPU) -> list[ArmOutcome]:
    return list(run_jobs(jobs, time.monotonic() + 1_000, limit_s, program))


def record(mean_s: float, **others: object) -> dict[str, Any]:
    return {
        "tokens": 64,
        "configuration": "an engine",
        "iteration_s": [mean_s] * 3,
        "mean_s": mean_s,
        "phases_s": [[0.1] * 3] * 3,
        "losses": [2.0, 1.0],
        "gpu_peak_bytes": 0,
        "host_peak_bytes": 10**9,
        **others,
    }


def medians(rows: list[Row], variant: str) -> dict[str, float]:
    return {row.quantity: sorted(row.samples)[0] for row in rows if row.variant == variant and row.samples}


@pytest.mark.parametrize(
    ("arm", "program"),
    [
        (STOCK.name, ON_CPU),
        (FSDP2, ON_CPU),
        (TINY_OURS, ON_SOFTWARE_GPU),
        pytest.param(NO_OFFLOAD.name, ON_CPU, marks=pytest.mark.thorough),
        pytest.param(OURS_EMPTY.name, ON_CPU, marks=pytest.mark.thorough),
        pytest.param("Twin-Flow", ON_CPU, marks=pytest.mark.thorough),
        pytest.param(STOCK.name, ON_SOFTWARE_GPU, marks=pytest.mark.thorough),
        pytest.param(OURS_EMPTY.name, ON_SOFTWARE_GPU, marks=pytest.mark.thorough),
    ],
)
def test_an_arm_trains_with_each_number_of_tokens_and_leaves_its_rows(arm: str, program: str) -> None:
    (outcome,) = outcomes_of(tiny(arm, 64, 32), program=program)
    assert outcome.error == ""
    rows = list(rows_of(iter([outcome])))
    assert {row.setting["tokens"] for row in rows} == {64, 32}
    found = medians(rows, arm)
    wanted = {"iteration", "mean of all iterations", "throughput", "step() on the host", "peak host memory"}
    assert wanted <= found.keys()
    assert all(found[quantity] > 0 for quantity in wanted)
    assert (COST in found) == (arm != FSDP2)
    losses = [row.value for row in rows if row.quantity == "losses"]
    assert len(losses) == 2
    assert isinstance(losses[1], str)
    assert len(set(losses[1].split())) > 10, "the loss changes"


@pytest.mark.parametrize(
    ("ranks", "program"),
    [
        (2, ON_SOFTWARE_GPU),
        pytest.param(1, ON_SOFTWARE_GPU, marks=pytest.mark.thorough),
        pytest.param(1, ON_CPU, marks=pytest.mark.thorough),
        pytest.param(2, ON_CPU, marks=pytest.mark.thorough),
    ],
)
def test_ours_has_the_bits_of_stock(ranks: int, program: str) -> None:
    outcomes = outcomes_of(*bits_jobs("tiny", 64, ranks), program=program)
    assert [len(outcome.records) for outcome in outcomes] == [ranks, ranks]
    (row,) = rows_of(iter(outcomes))
    assert (row.variant, row.quantity, row.value, row.claimed) == (TINY_OURS, BIT_IDENTICAL, True, True)
    assert row.setting["ranks"] == ranks


def test_a_job_that_fails_or_outlives_its_limit_leaves_its_error_and_the_next_one_runs() -> None:
    fails, hangs, last = [*outcomes_of(tiny("no such arm")), *outcomes_of(tiny(STOCK.name), tiny(TORCHAO), limit_s=0.5)]
    assert fails.error == "KeyError: 'no such arm'"
    assert hangs.error == "did not end within 0 s"
    assert last.waived == "torchao is not installed"
    rows = list(rows_of(iter([fails, hangs, last])))
    assert [(row.variant, row.quantity, row.value or row.waived) for row in rows] == [
        ("no such arm", "completed", None),
        ("no such arm", "error", fails.error),
        (STOCK.name, "completed", None),
        (STOCK.name, "error", hangs.error),
        (TORCHAO, "iteration", last.waived),
    ]
    assert all(row.claimed for row in rows if row.quantity == "completed"), "the run of the benchmark fails"


def test_a_job_without_time_is_waived() -> None:
    (outcome,) = run_jobs([tiny(STOCK.name)], time.monotonic() + 1)
    assert outcome.waived == "no time was left"


def test_the_rows_of_an_arm_are_written_before_the_next_arm_starts(tmp_path: Path) -> None:
    written = []

    def outcomes() -> Iterator[ArmOutcome]:
        for arm in (STOCK.name, NO_OFFLOAD.name):
            yield ArmOutcome(job=tiny(arm), records=[[record(1.0)]])
            written.append({row["variant"] for row in read_rows(tmp_path / "gpu.jsonl")})

    results = Results("gpu", tmp_path, quick=True)
    for row in rows_of(outcomes()):
        results.add(row)
    assert written == [{STOCK.name}, {STOCK.name, NO_OFFLOAD.name}]


def test_cost_and_retained_refer_to_stock_and_to_no_offload() -> None:
    def outcome(arm: str, mean_s: float, without_s: float, **others: object) -> ArmOutcome:
        return ArmOutcome(job=tiny(arm), records=[[record(mean_s, without_updates_s=[without_s], **others)]])

    outcomes = [outcome(NO_OFFLOAD.name, 1.5, 1.4), outcome(STOCK.name, 4.0, 2.0), outcome("ours", 2.5, 2.0, joules=7)]
    rows = list(rows_of(iter(outcomes)))
    found = medians(rows, "ours")
    assert found[COST] == 0.5
    assert found[COST_SHARE] == 0.25
    assert found[RETAINED] == 0.6
    assert found["throughput"] == 64 / 2.5
    assert found["energy of an iteration"] == 7
    assert medians(rows, STOCK.name)[RETAINED] == 1.5 / 4.0
    alone = list(rows_of(iter(outcomes[1:2])))
    assert [row.waived for row in alone if row.quantity == RETAINED] == ["no offload has no result"]


def test_of_a_job_that_is_killed_while_it_trains_without_updates_the_times_are_kept() -> None:
    timed, merged = record(4.0), record(4.0, without_updates_s=[2.0])
    for records, cost in (([timed], None), ([timed, merged], 2.0)):
        rows = list(rows_of(iter([ArmOutcome(job=tiny(STOCK.name), records=[records])])))
        assert medians(rows, STOCK.name).get(COST) == cost
        assert [row.quantity for row in rows].count("iteration") == 1


def test_other_bits_and_losses_are_a_claim_that_does_not_hold() -> None:
    stock, ours = bits_jobs("tiny", 64, ranks=1)
    same = ArmOutcome(job=stock, records=[[record(1.0, digest="1")]])
    for others in ({"digest": "2"}, {"digest": "1", "losses": [2.0, 1.1]}):
        (row,) = rows_of(iter([same, ArmOutcome(job=ours, records=[[record(1.0, **others)]])]))
        assert (row.value, row.claimed) == (False, True)
    failed = ArmOutcome(job=stock, records=[[]], error="no memory")
    rows = list(rows_of(iter([failed, replace(same, job=ours)])))
    assert [row.quantity for row in rows] == ["completed", "error"], "there is nothing to compare with"


def test_the_models_have_the_sizes_that_hugging_face_computes() -> None:
    assert MODELS["Qwen3-4B"].parameters == 4_022_468_096
    setting = ArmJob(arm=STOCK.name, model="Qwen3-1.7B", tokens=(16_384,)).setting
    assert (setting.parameters, setting.micro_batch, setting.tokens) == (1_720_574_976, 8, 16_384)
    zero = STOCK.config_for(setting)["zero_optimization"]
    assert zero["reduce_bucket_size"] == 2048**2
    assert zero["stage3_prefetch_bucket_size"] == 3_774_873
    assert zero["stage3_param_persistence_threshold"] == 20_480
    assert zero["sub_group_size"] == 10**9
    block = ours_limited(setting).config_for(setting)["deep_optimizer_states"]
    assert (ours_limited(setting).name, block) == ("ours, 8 GB", {"gpu_memory_gb": 8.0})


def test_twin_flow_has_as_much_gpu_memory_as_ours() -> None:
    job = ArmJob(arm="Twin-Flow", model="Qwen3-4B", tokens=(8_192,))
    assert job.variant is not None
    ratio = job.variant.config_for(job.setting)["zero_optimization"]["offload_optimizer"]["ratio"]
    # 5 of the 41 sub-groups of 100 million parameters have 16 bytes per parameter there.
    assert int((1 - ratio) * 41) == 5


def test_the_arms_that_others_are_compared_with_come_first() -> None:
    jobs = timed_jobs("Qwen3-1.7B", (16_384, 8_192))
    assert [job.arm for job in jobs[:3]] == [NO_OFFLOAD.name, STOCK.name, "ours, 8 GB"]
    trained = {(job.arm, tokens) for job in jobs for tokens in job.tokens}
    arms = {STOCK.name, NO_OFFLOAD.name, "ours, 8 GB", OURS_EMPTY.name, "Twin-Flow", FSDP2, TORCHAO, SUPER.name}
    arms |= {f"{name}, bf16 states" for name in (STOCK.name, "ours, 8 GB")}
    assert trained == {(arm, tokens) for arm in arms for tokens in (16_384, 8_192)}


def test_energy_is_absent_without_a_gpu_and_in_joules_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        assert energy.joules() is None

    def read(_: object, used: Any) -> int:
        used._obj.value = 5_000
        return 0

    monkeypatch.setattr(energy, "_gpu", lambda: (SimpleNamespace(nvmlDeviceGetTotalEnergyConsumption=read), None))
    assert energy.joules() == 5.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("target", ["gpu-bench", "gpu-bits"])
def test_the_target_is_waived_without_a_gpu(target: str, tmp_path: Path) -> None:
    command = ["make", "--silent", target, f"PYTHON={sys.executable}"]
    variables = {**os.environ, "OUT": str(tmp_path)}
    done = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "WAIVED: no GPU" in done.stdout
