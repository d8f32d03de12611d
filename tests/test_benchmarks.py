"""Check that the benchmarks run without a GPU, give reasons for waivers, and that exact variants have stock's bits."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.__main__ import main as benchmarks_main
from benchmarks.emulated import EXPOSED, ITERATION, PREDICTED_EXPOSED, PREDICTED_ITERATION
from benchmarks.emulated.arms import COSTED, FEW_ARMS
from benchmarks.emulated.prediction import is_negligible
from benchmarks.emulated.small_copies import CHUNKS, LATENCY, WHOLE
from benchmarks.harness import variants
from benchmarks.harness.interleaved_runs import EngineRun, ExposedWaits
from benchmarks.harness.rows import COMPLETE, RESULTS, read_rows
from benchmarks.harness.setting import TrainingSetting
from benchmarks.harness.sizes import with_default_sub_groups
from benchmarks.harness.small_copies import DIRECTIONS
from benchmarks.harness.targets import EMULATED_COST, EMULATED_COST_SHARE
from perf_model.prediction.timeline import Phase, PhaseSpan
from tests.launch import run_ranks
from tests.tiers import thorough

UPDATE = ("update", "update exposed")


def run_quickly(name: str, folder: Path, timeout_s: float = 250) -> list[dict[str, Any]]:
    """Run a benchmark with ``--quick`` in a process of its own, and return its rows."""
    arguments = ["-m", "benchmarks", name, "--quick", "--output", str(folder)]
    (finished,) = run_ranks(1, arguments, timeout_s=timeout_s)
    assert finished.returncode == 0, finished.output[-4000:]
    return read_rows(folder / f"{name}.jsonl")


@pytest.mark.parametrize("name", [thorough("update_phase"), "overlap"])
def test_every_exact_variant_is_bit_identical_to_stock(name: str, tmp_path: Path) -> None:
    rows = run_quickly(name, tmp_path)
    assert not [row for row in rows if row.get("failed")]
    bits = {row["variant"]: row["value"] for row in rows if row["quantity"] == "bit-identical to stock"}
    seconds = {row["variant"]: row["median"] for row in rows if row["quantity"] in UPDATE and "median" in row}
    assert len(bits) >= 5
    assert bits.keys() <= seconds.keys()
    assert all(value > 0 for value in seconds.values())
    # The time for which forward and backward wait for an update is subtracted from them only once.
    assert not [row for row in rows if row.get("unit") == "s" and row["p20"] < 0]
    inexact = {"Twin-Flow", "stock, bound to cores", "stock, no clipping"}
    assert {variant for variant, same in bits.items() if not same} <= inexact
    classes = {row["variant"]: row["value"].split()[0] for row in rows if row["quantity"] == "configuration"}
    assert classes.keys() == bits.keys()
    assert classes["stock"] == "DeepSpeedZeroOptimizer_Stage3"
    waived = {row["variant"]: row["waived"] for row in rows if "waived" in row}
    if name == "update_phase":
        assert set(waived) == {"SuperOffload", "SuperOffload, no clipping", "ZenFlow (approximate)"}
        assert set(waived.values()) == {"DeepSpeed 0.19.8 supports it on CUDA only"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        "adam",
        "training_step",
        "ablation",
        "trace",
        "exactness",
        "model_error",
        "overhead",
        "hooks",
        "beside",
        "planner",
        "scaling",
        "simulated_scaling",
        "slots",
        "disk",
    ],
)
def test_quick_run_gives_numbers_and_no_failed_claim(name: str, tmp_path: Path) -> None:
    rows = run_quickly(name, tmp_path)
    assert any("median" in row for row in rows)
    assert not [row for row in rows if row.get("failed")]


@pytest.mark.thorough
def test_emulated_arms_have_stocks_bits_and_every_row_says_that_it_is_emulated(tmp_path: Path) -> None:
    *rows, complete = run_quickly("emulated", tmp_path)
    assert complete["quantity"] == COMPLETE
    assert not [row for row in rows if "EMULATED" not in row["quantity"] or "EMULATED" not in row["setting"]["machine"]]
    bits = {row["variant"]: row["value"] for row in rows if row["quantity"].startswith("bit-identical")}
    assert bits == dict.fromkeys(FEW_ARMS, True)
    for quantity in (ITERATION, PREDICTED_ITERATION, EXPOSED, PREDICTED_EXPOSED):
        seconds = {row["variant"]: row["median"] for row in rows if row["quantity"] == quantity}
        assert seconds.keys() == bits.keys()
        assert all(value > 0 for value in seconds.values())
    for quantity in (EMULATED_COST, EMULATED_COST_SHARE):
        costs = {row["variant"]: row["median"] for row in rows if row["quantity"] == quantity}
        assert costs.keys() == set(COSTED)
        assert all(value > 0 for value in costs.values())
    assert costs["planned, overlap"] < costs["stock"] == 1
    errors = [row["variant"] for row in rows if row["quantity"] == f"{EXPOSED}, prediction error"]
    assert errors[:3] == list(FEW_ARMS[:3]), "without a plan, no exposed time is negligible at micro-batch 1"
    for direction in DIRECTIONS:
        latencies = [row for row in rows if row["quantity"] == f"{LATENCY}, {direction}"]
        assert {row["variant"] for row in latencies} == {CHUNKS, WHOLE}
        assert all(row["samples"] > 1 and row["median"] > 0 for row in latencies)


@pytest.mark.parametrize(
    ("predicted_s", "exposed_s", "negligible"),
    [(0.01, [0.02, 0.04, 0.9], True), (0.06, [0.01, 0.01, 0.01], False), (0.01, [0.01, 0.06, 0.07], False)],
)
def test_an_exposed_time_is_negligible_only_if_it_is_so_as_predicted_and_as_measured(
    predicted_s: float, exposed_s: list[float], negligible: bool
) -> None:
    assert is_negligible(predicted_s, exposed_s, stock_update_s=[1.0]) == negligible


@pytest.mark.thorough
def test_a_quick_run_of_the_reliability_figures_finds_no_failure(tmp_path: Path) -> None:
    *rows, complete = run_quickly("reliability", tmp_path, timeout_s=1_800)
    assert complete["quantity"] == COMPLETE
    tried = {row["variant"]: row["value"] for row in rows if row["quantity"] == "tried"}
    assert len(tried) == 5
    assert tried["kills, 2 ranks"] == "3"
    assert {row["value"] for row in rows if row["quantity"] == "failures"} == {"0"}


@pytest.mark.parametrize("assignment", ["hours=1", "kills=many", "kills", "seed=-1"])
def test_a_parameter_that_a_benchmark_does_not_have_is_refused(
    assignment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        benchmarks_main(["reliability", "--set", assignment])
    assert f"found {assignment!r}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["all", "report"])
def test_parameters_are_refused_without_one_benchmark(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmarks_main([command, "--set", "minutes=10"])
    assert f"--set must be absent with {command}, found 'minutes=10'" in capsys.readouterr().err


@pytest.mark.thorough
def test_worked_example_of_the_documentation_runs(tmp_path: Path) -> None:
    page = RESULTS.parents[1] / "docs" / "benchmarking.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    script = tmp_path / "clipping.py"
    script.write_text(example + RUN_EXAMPLE)
    (finished,) = run_ranks(1, [str(script)], timeout_s=250)
    assert finished.returncode == 0, finished.output[-4000:]
    quantities = {tuple(answer) for answer in finished.answers()}
    assert {variant for variant, _ in quantities} == {
        "stock",
        "stock, no clipping",
        "ours, all on the CPU",
        "ours, no clipping",
    }
    assert "error" not in {quantity for _, quantity in quantities}


RUN_EXAMPLE = """
if __name__ == "__main__":
    from tests.launch import answer

    for row in measure(quick=True):
        answer([row.variant, row.quantity])
"""


SETTING = TrainingSetting(layers=4, width=1024, context=64, micro_batch=1, sub_group_size=10_000_000)


def test_variants_have_the_config_that_their_names_promise() -> None:
    # DeepSpeed clips to 1.0 unless the config sets a value, so that 0.0 has to be written out.
    assert variants.SUPER_UNCLIPPED.config_for(SETTING)["gradient_clipping"] == 0.0
    assert variants.STOCK.config_for(SETTING)["gradient_clipping"] == 1.0
    assert "offload_optimizer" not in variants.NO_OFFLOAD.config_for(SETTING)["zero_optimization"]
    by_default = variants.STOCK.config_for(with_default_sub_groups(SETTING))["zero_optimization"]
    assert by_default["sub_group_size"] == 10**9
    memory = variants.PLANNED.config_for(SETTING)["deep_optimizer_states"]["gpu_memory_gb"]
    assert memory * 1e9 == pytest.approx(24 * 10_000_000 + 2 * SETTING.parameters)
    # Two of the six sub-groups fit into that memory, with 16 bytes per parameter.
    ratio = variants.twin_flow(SETTING).config_for(SETTING)["zero_optimization"]["offload_optimizer"]["ratio"]
    assert int((1 - ratio) * 6) == 2


def test_no_offload_is_waived_if_it_does_not_fit_into_memory() -> None:
    assert variants.NO_OFFLOAD.waived_reason(SETTING) is None
    huge = replace(SETTING, layers=1000, width=16384)
    assert variants.NO_OFFLOAD.waived_reason(huge) == "does not fit into memory"


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (replace(variants.STOCK, name="stock with other clipping", clipping=0.5), "clips to 1.0"),
        (replace(variants.STOCK, name="ours, missing", optimizer_class=variants.OURS_STAGE_3), "the optimizer is"),
        (
            replace(variants.ALL_CPU, name="stock's kernel, missing", cpu_kernel="StockAdam"),
            "the CPU kernel is FusedAdam",
        ),
        (replace(variants.STOCK, name="Twin-Flow, missing", offload={"ratio": 0.5}), "ratio 1.0"),
    ],
    ids=lambda parameter: parameter.name if isinstance(parameter, variants.Variant) else "",
)
def test_engine_of_another_variant_is_refused(variant: variants.Variant, message: str) -> None:
    actual = replace(variants.STOCK if variant.block is None else variants.ALL_CPU, name=variant.name)
    with pytest.raises(AssertionError, match=message):
        variant.verify(FakeEngine(actual))


class FakeEngine:
    """The attributes of an engine of ``variant`` that ``Variant.verify`` reads."""

    def __init__(self, variant: variants.Variant) -> None:
        groups, config = [None] * 6, SimpleNamespace(overlap_backward=False, overlap_forward=False)
        kernel = type(variant.cpu_kernel or "None", (), {})()
        inner = type(variant.inner_optimizer, (), {})()
        attributes = {
            "optimizer": inner,
            "partial_offload": 1.0,
            "fp16_groups": groups,
            "_config": config,
            "_assembly": SimpleNamespace(kernels=(kernel,)),
        }
        self.optimizer = type(variant.optimizer_class, (), attributes)()
        assert variant.verify(self).startswith(variant.optimizer_class)

    def gradient_clipping(self) -> float:
        """Return DeepSpeed's default."""
        return 1.0

    def zero_overlap_comm(self) -> bool:
        """Return DeepSpeed's default for stage 3."""
        return True

    def zero_offload_optimizer(self) -> Any:
        """Return the offloading config."""
        return SimpleNamespace(pin_memory=True)


def test_waits_are_subtracted_from_the_phase_in_which_they_occur() -> None:
    """Check two updates that continue in the next forward and end in its backward, and one that ends in ``step()``."""
    update, reported = SimpleNamespace(count=0), []
    optimizer = SimpleNamespace(
        _running=SimpleNamespace(exposure=SimpleNamespace(waits=update)),
        report=SimpleNamespace(updated=lambda phases, timeline: reported.append(phases)),
    )
    waits = ExposedWaits()
    waits.watch(optimizer)
    for in_step, by_forward, end in ((2, 3, 4), (1, 4, 4), (1, 1, 1)):
        update.count = in_step
        waits.after_step()
        update.count = by_forward
        if in_step < by_forward:
            waits.after_forward()
            # The same step's second micro-batch follows.
            update.count = end
            waits.after_forward()
        seconds = [0.1 * 2**number for number in range(end)]
        spans = [PhaseSpan(Phase.EXPOSED, 10.0 * at, 10.0 * at + wait_s) for at, wait_s in enumerate(seconds)]
        optimizer.report.updated(
            (PhaseSpan(Phase.BACKWARD, -1.0, 0.0), *spans),
            lambda: SimpleNamespace(hidden_s=lambda exposed_s: exposed_s),
        )
    run = EngineRun(variants.OURS_DEFAULT, SETTING)
    run.step_s, run.forward_s, run.backward_s = [1.0, 1.0, 1.0], [3.0, 3.0, 3.0], [5.0, 5.0, 5.0]
    waits.account(run)
    # The first update waits 0.1 and 0.2 in its step, 0.4 in the next forward and 0.8 in the backward after it.
    assert run.exposed_s == pytest.approx([1.0 + 0.4 + 0.8, 1.0 + 0.2 + 0.4 + 0.8, 1.0])
    assert run.forward_s == pytest.approx([3.0, 3.0 - 0.4, 3.0 - 0.2 - 0.4 - 0.8])
    assert run.backward_s == pytest.approx([5.0, 5.0 - 0.8, 5.0])
    assert run.hidden_s == pytest.approx([1.5, 1.5, 0.1])
    assert len(reported) == 3
