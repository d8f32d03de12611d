"""Test the first sentences of ``plan``: whether training fits without offloading, the gain of the plan, past errors."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.__main__ import main
from perf_model.presets.comparison import LARGER_MODELS
from perf_model.training_run.micro_batch import NEAREST_HOST
from perf_model.units import gigabytes_per_second, params_per_second, seconds, significant, size, size_of
from tests.cli.planning import job, planned

ONE_RANK: dict[str, Any] = {"world_size": 1, "ranks_per_node": 1, "unit_size": 10**8}


def whole_screen(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    assert main(["plan", *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


def sentences(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    assert main(["plan", *arguments]) == 0
    return " ".join(capsys.readouterr().out.partition("\n\n")[0].split())


@pytest.mark.parametrize(
    ("machine", "fits", "memory"),
    [
        ("h200-pcie5", "fits on 1 x H200-141GB", "140 GB of 149 GB per GPU"),
        ("h100-pcie5", "does not fit on 1 x H100-80GB", "140 GB of 83.5 GB per GPU"),
    ],
)
def test_the_first_sentences_state_whether_training_fits_without_offloading_and_the_speed_ups(
    machine: str, fits: str, memory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = job(machine, "Llama-3-8B", **ONE_RANK)
    found = planned(arguments)
    answer = sentences(capsys, arguments)
    assert answer.startswith(f"Llama-3-8B {fits} without offloading ({memory}")
    plan_s, stock_s, no_offload_s = (
        outcome["iteration_s"]
        for outcome in (found["predicted"], found["baselines"]["stock"], found["baselines"]["no_offload"])
    )
    assert f"{significant(stock_s / plan_s, 2)} times as fast as with stock DeepSpeed's offload" in answer
    assert ("times as fast as without offloading" in answer) == (no_offload_s is not None)
    if no_offload_s is not None:
        assert f"{significant(no_offload_s / plan_s, 2)} times as fast as without offloading" in answer
        assert f"{seconds(no_offload_s, 2)} per iteration" in answer


def test_the_answer_is_in_the_first_three_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *job("gh200", **ONE_RANK)]) == 0
    first = " ".join(capsys.readouterr().out.splitlines()[:3])
    assert "does not fit" in first
    assert re.search(r"an iteration takes \S+ m?s: \S+ times as fast as with stock\s+DeepSpeed's offload", first)


def test_the_sentence_on_past_errors_has_the_figures_of_the_validation(capsys: pytest.CaptureFixture[str]) -> None:
    runs, median, p90 = LARGER_MODELS
    assert (
        f"Iterations of {runs} published runs on A100-40GB and H100-80GB were off by "
        f"{median:.0%} in the median and by at most {p90:.0%} in nine of ten"
    ) in whole_screen(capsys, job("h100", "Llama-3-8B", unit_size=10**9))


def test_the_answer_states_that_stock_cannot_run_where_the_plan_can(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = job("h100-pcie5", "Llama-3-8B", **ONE_RANK, host_memory_gb=150)
    found = planned(arguments)
    assert found["baselines"]["stock"]["iteration_s"] is None
    assert found["baselines"]["stock"]["why"].startswith("does not fit: it exceeds host memory by 8.5 GB per rank")
    assert found["predicted"]["speed_up"] is None
    answer = sentences(capsys, arguments)
    assert re.search(r"With this plan, an iteration takes \S+ m?s: stock DeepSpeed's offload cannot run;", answer)
    assert "times as fast as with stock" not in answer


def test_the_legend_states_where_the_fixed_seconds_are_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *job("h100-pcie5", "Llama-3-8B", unit_size=10**9)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "the host takes at least 650 us per module in forward, 1.2 ms in backward and 300 us in step()" in text
    assert f"by {NEAREST_HOST.source}" in text


def test_predicted_seconds_and_bytes_have_two_significant_digits(capsys: pytest.CaptureFixture[str]) -> None:
    """Check all durations and all sizes but the limits, which follow "of" and are given or known."""
    arguments = [*job("gh200", **ONE_RANK), "--units", "--explain"]
    assert main(["plan", *arguments]) == 0
    shown = " ".join(capsys.readouterr().out.partition("Paste into")[0].split())
    figures = re.findall(r"(?<!of )(?<![-\w])([\d,]+(?:\.\d+)?) (?:s|ms|us|TB|GB|MB|kB)\b", shown)
    assert len(figures) >= 40
    for figure in figures:
        digits = figure.replace(",", "").replace(".", "").lstrip("0")
        assert len(digits.rstrip("0")) <= 2, figure
        assert "." not in figure or len(digits) <= 2, figure


def test_the_answer_ends_with_the_longest_part_of_an_iteration(capsys: pytest.CaptureFixture[str]) -> None:
    slow = job("h100-pcie5", "7B", world_size=16, ranks_per_node=8, network_gb_per_s=0.1, unit_size=10**9)
    assert sentences(capsys, slow).endswith("; the network takes longest.")
    alone = job("gh200", "Llama-3-8B", **ONE_RANK, micro_batch=8)
    assert sentences(capsys, alone).endswith("; computing takes longest.")


def test_the_groups_of_units_are_explained_with_the_effect_of_more_memory_and_cores(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = job(gpu_memory_gb=40, unit_size=10**8, eager_memory_gb=4)
    shown = whole_screen(capsys, [*arguments, "--explain"])
    effect = r"would (?:change nothing|shorten the iteration by [\d.]+ m?s)"
    assert re.search(
        rf"cpu: \d+ units, .* B parameters, .* for \d+% of the update; one more core per rank {effect}\.", shown
    )
    assert re.search(rf"streamed: \d+ units, .*; 1 GB more of GPU memory {effect}\.", shown)
    assert re.search(rf"eager: \d+ of the cpu units, .* B parameters; 1 GB more of --eager-memory-gb {effect}\.", shown)


def test_changes_with_which_a_job_fits_are_named_alone_and_in_pairs_by_their_cost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = job("rtx4090", "Qwen2.5-7B", **ONE_RANK | {"unit_size": 10**9}, micro_batch=4, sequence=1024)
    assert main(["plan", *arguments]) == 1
    rule, title, *changes, limits, training = capsys.readouterr().err.splitlines()
    assert rule.startswith("Nothing fits: the nearest plan exceeds gpu memory by ")
    assert title == "It fits with:"
    tokens = {line.partition(":")[0].strip(): int(line.split()[-2].replace(",", "")) for line in changes}
    assert list(tokens.values()) == sorted(tokens.values(), reverse=True)
    assert "--sequence 512 --micro-batch 2" in tokens
    assert limits.startswith("GPU memory: raise --gpu-memory-gb")
    assert training.startswith("Without the optimizer, training takes ")
    for change in tokens:
        assert main(["plan", *arguments, *change.split()]) == 0, change


def test_smaller_states_are_named_where_host_memory_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = job("h100-pcie5", "7B", **ONE_RANK | {"unit_size": 10**9}, host_memory_gb=75)
    assert main(["plan", *arguments]) == 1
    rule, title, change, _ = capsys.readouterr().err.splitlines()
    assert "host memory" in rule
    assert title == "It fits with (bf16 states change the numerics of training):"
    assert change.startswith("  --states bf16: ")
    found = planned([*arguments, "--states", "bf16"])
    keys = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    assert found["deepspeed_config"]["bf16"] == keys
    numel = sum(unit["numel"] for unit in found["units"])
    assert found["memory"]["pinned_bytes"] == pytest.approx((3 * 2 + 2) * numel, rel=1e-3)
    assert "bf16 with states bf16" in whole_screen(capsys, [*arguments, "--states", "bf16"])


@pytest.mark.parametrize(("states", "no_offload"), [("bf16-masters", False), ("bf16", True)])
def test_bf16_states_shorten_updates_of_stock_and_of_the_plan(states: str, no_offload: bool) -> None:
    arguments = job("h200-pcie5", "7B", **ONE_RANK)
    fp32, found = planned(arguments), planned([*arguments, "--states", states])
    assert found["predicted"]["update_s"] < fp32["predicted"]["update_s"]
    assert found["baselines"]["stock"]["update_s"] < fp32["baselines"]["stock"]["update_s"]
    # DeepSpeed keeps bf16 masters with fp32 moments in host memory only.
    assert (found["baselines"]["no_offload"]["iteration_s"] is not None) == no_offload
    assert found["memory"]["no_offload_bytes"] < fp32["memory"]["no_offload_bytes"]


def test_more_machines_are_named_last_and_only_if_there_is_a_second_one(capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"model": "20B", "gpu_memory_gb": 16, "unit_size": 10**9}
    for nodes in (1, 2):
        assert main(["plan", *job(world_size=4 * nodes, **options)]) == 1
        changes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  ")]
        of_machines = [change for change in changes if "--world-size" in change]
        assert of_machines == changes[len(changes) - (nodes - 1) :]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (size(120_000, 2), "120 kB"),
        (size(999_400, 2), "1.0 MB"),
        (size(0), "0 kB"),
        (gigabytes_per_second(1.5e12), "1,500 GB/s"),
        (gigabytes_per_second(25e9), "25 GB/s"),
        (gigabytes_per_second(1.234e9), "1.23 GB/s"),
        (params_per_second(1.5e12), "1,500 B params/s"),
        (params_per_second(25e6), "25 M params/s"),
        (size_of(76e9, 85.52e9), "76 GB of 85.5 GB"),
        (size_of(85.52e9, 85.52e9), "85.5 GB of 85.5 GB"),
        (size_of(85.51e9, 85.52e9), "85.51 GB of 85.52 GB"),
        (size_of(76e9, None), "76 GB (limit unknown)"),
    ],
)
def test_a_quantity_is_formatted_with_its_digits(shown: str, expected: str) -> None:
    assert shown == expected


@given(st.floats(1e5, 1e14), st.integers(1, 4))
def test_no_quantity_of_a_machine_is_formatted_with_an_exponent(value: float, digits: int) -> None:
    for shown in (size(value, digits), gigabytes_per_second(value), params_per_second(value)):
        number, *_ = shown.split()
        assert set(number) <= set("0123456789.,")
