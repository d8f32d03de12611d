"""Check that the benchmarks run without a GPU, give reasons for waivers, and that exact variants have stock's bits."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.__main__ import main as benchmarks_main
from benchmarks.emulated import EXPOSED, ITERATION, PREDICTED_EXPOSED, PREDICTED_ITERATION
from benchmarks.emulated.arms import FEW_ARMS
from benchmarks.emulated.prediction import is_negligible
from benchmarks.emulated.small_copies import CHUNKS, LATENCY, WHOLE
from benchmarks.harness import variants
from benchmarks.harness.charts import draw
from benchmarks.harness.interleaved_runs import EngineRun, ExposedWaits
from benchmarks.harness.results_page import last_runs, render
from benchmarks.harness.rows import (
    BENCHMARKS,
    COMPLETE,
    EMULATED,
    RESULTS,
    SIMULATED,
    Results,
    Row,
    format_row,
    read_rows,
)
from benchmarks.harness.setting import TrainingSetting
from benchmarks.harness.sizes import with_default_sub_groups
from benchmarks.harness.small_copies import DIRECTIONS
from benchmarks.harness.targets import (
    BIT_IDENTICAL,
    ITERATION_SPEEDUP,
    MEMORY_BOUND_SPEEDUP,
    SAME_BITS,
    TARGETS,
    UPDATE_SPEEDUP,
)
from perf_model.prediction.timeline import Phase, PhaseSpan
from tests.launch import run_ranks
from tests.tiers import thorough

UPDATE = ("update", "update exposed")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Return a folder with the rows of one complete run of ``adam``: a time, a claim and a waiver."""
    results = Results("adam", tmp_path, quick=False)
    samples = (0.2, 0.1, 0.3, 0.4, 0.5)
    results.add(Row(variant="ours", quantity="update", unit="s", samples=samples, setting={"threads": 2}))
    results.add(
        Row(variant="ours", quantity="bit-identical to stock", value=True, claimed=True, setting={"threads": 2})
    )
    results.add(Row(variant="GPU", quantity="update", waived="no GPU | none"))
    results.finish()
    return tmp_path


def page_of(folder: Path) -> str:
    """Return the page that shows the rows of ``folder``."""
    return render(last_runs(folder))


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
        "planner",
        "scaling",
        "simulated_scaling",
        "slots",
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
    errors = [row["variant"] for row in rows if row["quantity"] == f"{EXPOSED}, prediction error"]
    assert errors == list(FEW_ARMS), "no exposed time is negligible at micro-batch 1"
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
    assert len(tried) == 8
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


@pytest.mark.parametrize(
    ("quantities", "how"),
    [
        (["exposed"], "Measured"),
        ([f"{SIMULATED} exposed", "planning time (CPU)"], "Measured and SIMULATED"),
        ([f"exposed ({EMULATED})", f"{SIMULATED} exposed"], "EMULATED and SIMULATED"),
    ],
)
def test_a_run_is_headed_by_how_each_of_its_quantities_was_made(
    quantities: list[str], how: str, tmp_path: Path
) -> None:
    results = Results("slots", tmp_path, quick=False)
    for quantity in quantities:
        results.add(Row(variant="ours", quantity=quantity, unit="s", samples=[1.0]))
    assert f"\n{how} on " in page_of(tmp_path)


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


def test_rows_have_machine_date_and_spread(results: Path) -> None:
    first, claim, waived, _ = read_rows(results / "adam.jsonl")
    assert {"date", "commit", "cpu", "cores", "gpu", "versions", "benchmark", "quick"} < first.keys()
    assert (first["median"], first["p20"], first["p80"], first["samples"]) == (0.3, 0.2, 0.4, 5)
    assert (first["unit"], first["setting"], claim["value"], waived["waived"]) == (
        "s",
        {"threads": 2},
        True,
        "no GPU | none",
    )
    assert format_row(first) == ("300 ms", "200 ms to 400 ms")
    assert "failed" not in claim


def test_new_rows_have_the_keys_of_the_committed_rows(results: Path) -> None:
    """Check that new and committed rows can be read from one file."""
    first, *_ = map(json.loads, (results / "adam.jsonl").read_text().splitlines())
    committed = json.loads((RESULTS / "overhead.jsonl").read_text().splitlines()[0])
    assert first.keys() >= committed.keys()


def test_claim_that_does_not_hold_is_marked_as_failed() -> None:
    claim = Row(variant="ours", quantity="bit-identical to stock", value=False, claimed=True)
    assert claim.as_dict()["failed"] is True
    assert "failed" not in Row(variant="ZenFlow", quantity="bit-identical to stock", value=False).as_dict()


def test_every_number_of_the_page_comes_from_a_row(results: Path) -> None:
    page = page_of(results)
    assert "Setting of all rows: threads 2\n\n| variant | update | bit-identical to stock |\n" in page
    assert "| ours | 300 ms (200 ms to 400 ms) | yes |" in page
    assert "- Waived (no GPU | none): GPU" in page
    for name in BENCHMARKS:
        assert f"## {name}: " in page
        assert (f"**Not measured**: run `python -m benchmarks {name}`" in page) == (name != "adam")


@pytest.mark.parametrize(
    ("cores", "median", "status"),
    [(2, 1.7, "| met |"), (2, 1.5, "| **missed** |"), (64, 1.5, "| **not measured** |")],
)
def test_targets_are_checked_against_the_rows(cores: int, median: float, status: str, tmp_path: Path) -> None:
    all_cpu = "ours, all on the CPU"
    results = Results("update_phase", tmp_path, quick=False)
    setting = {"sub_group_size": 10_000_000}
    for name, samples in (("stock", [1.0]), (all_cpu, [median, 9.0, 0.1])):
        results.add(Row(variant=name, quantity=UPDATE_SPEEDUP, unit="times", samples=samples, setting=setting))
    for size, most in ((1, 9.0), (10_000_000, 1.42)):
        labels = {"variant": all_cpu, "setting": {"sub_group_size": size}}
        results.add(Row(quantity=MEMORY_BOUND_SPEEDUP, unit="times", samples=[most], **labels))
    # The target is only for machines with 2 cores and no GPU.
    rows = [{**row, "cores": cores, "gpu": None} for row in results.rows]
    results.path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    page = page_of(tmp_path)
    (line,) = (line for line in page.splitlines() if "1.55 times as fast" in line)
    assert status in line
    assert ("speedup if memory-bound: 1.42x" in line) == ("missed" in status)
    assert page.count("**not measured**") == len(TARGETS) - (cores == 2)


def test_the_page_begins_with_the_speed_ups_of_each_model(tmp_path: Path) -> None:
    """Check measured ratios, or those of the medians. Settings that differ in their sub-groups alone are one line."""
    for name, machine, iteration, plugin in (
        ("training_step", {}, "iteration", "ours"),
        (
            "emulated",
            {"machine": "EMULATED a100-pcie4, 4 GPUs", "model": "7B"},
            "EMULATED iteration",
            "planned, overlap",
        ),
    ):
        results = Results(name, tmp_path, quick=False)
        for sub_group_size in (10, 20):
            setting = {**machine, "parameters": 5_000_000, "micro_batch": 1, "sub_group_size": sub_group_size}
            for variant, seconds in (("stock", 3.0), (plugin, 2.0), ("another", 1.0)):
                results.add(Row(variant=variant, quantity=iteration, unit="s", samples=[seconds], setting=setting))
            if not machine:
                ratios = Row(
                    variant=plugin, quantity=ITERATION_SPEEDUP, unit="times", samples=[1.4, 1.6, 1.8], setting=setting
                )
                results.add(ratios)
                results.add(Row(variant=plugin, quantity=BIT_IDENTICAL, value=True, setting=setting))
        results.finish()
    top, _ = page_of(tmp_path).split("## Aims")
    measured, emulated = (line for line in top.splitlines() if line.startswith(("| measured", "| EMULATED")))
    assert measured.startswith("| measured on the CPU |")
    assert measured.endswith("| 5 M parameters | 1 | 3.00 s | 2.00 s | 1.6x (1.4x to 1.8x) | yes |")
    assert emulated == "| EMULATED | a100-pcie4, 4 GPUs | 7B | 1 | 3.00 s | 2.00 s | 1.5x | not compared |"
    assert "As measured on the CPU, an iteration is 1.60 times as fast as with stock DeepSpeed, in one setting." in top
    assert "On EMULATED GPUs, an iteration is 1.50 times as fast as with stock DeepSpeed, in one setting." in top


def test_only_the_first_table_of_a_benchmark_is_shown_and_only_if_it_is_short(tmp_path: Path) -> None:
    for name, lines in (("adam", 12), ("copy", 13)):
        results = Results(name, tmp_path, quick=False)
        for number in range(lines):
            results.add(Row(variant=f"variant {number}", quantity="time", unit="s", samples=[1.0]))
        results.add(Row(variant="another", quantity="time", unit="s", samples=[1.0], setting={"threads": 2}))
    page = page_of(tmp_path)
    adam, copy = (page.split(f"## {name}: ")[1].split("\n## ")[0] for name in ("adam", "copy"))
    assert re.findall("<summary>(.*)</summary>", adam) == ["1 line"]
    assert re.findall("<summary>(.*)</summary>", copy) == ["13 lines", "1 line"]


def test_target_is_checked_against_its_worst_setting(tmp_path: Path) -> None:
    results = Results("model_error", tmp_path, quick=False)
    results.rows = []
    for size, error in ((1, 0.02), (4, -0.3), (8, 0.2)):
        setting = {"sub_group_size": size}
        row = Row(variant="planned", quantity="prediction error", unit="share", samples=[error], setting=setting)
        results.add(row)
    (target,) = (target for target in TARGETS if target.quantity == "prediction error")
    verdict = target.check([{**row, "gpu": "a GPU"} for row in results.rows])
    assert verdict is not None
    assert (verdict.is_met, str(verdict)) == (False, "-30%, the worst of 3 results (variant: planned)")
    assert target.check([]) is None


def test_committed_page_shows_the_committed_rows() -> None:
    assert (RESULTS.parent / "RESULTS.md").read_text() == page_of(RESULTS), "run python -m benchmarks report"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_committed_rows_can_be_drawn(path: Path, tmp_path: Path) -> None:
    chart = importlib.import_module(f"benchmarks.{path.stem}").CHART
    for rows in last_runs(RESULTS)[path.stem]:
        drawn = draw(rows, tmp_path, chart)
        if drawn is None:
            assert any("waived" in row for row in rows)
            continue
        assert f"![{path.stem}](results/{drawn.name})" in page_of(RESULTS)
        assert drawn.read_bytes().startswith(b"\x89PNG")
        assert drawn.stat().st_size > 10_000, "not an empty figure"


def test_trace_is_written_next_to_the_rows(tmp_path: Path) -> None:
    results = Results("trace", tmp_path, quick=False)
    results.add(Row(variant="ours, all on the CPU", quantity="trace", trace=b"compressed"))
    name = results.rows[0]["value"]
    assert name.startswith("trace-")
    assert name.endswith("-ours-all-on-the-cpu.json.gz")
    assert (tmp_path / name).read_bytes() == b"compressed"
    assert f"[trace](results/{name})" in page_of(tmp_path)


def test_stopped_run_does_not_replace_a_complete_run(results: Path) -> None:
    path = results / "adam.jsonl"
    stopped = {**json.loads(path.read_text().splitlines()[0]), "date": "2999-01-01T00:00:00+00:00", "median": 0.7}
    path.write_text(path.read_text() + json.dumps(stopped) + "\n")
    assert "| ours | 300 ms" in page_of(results)
    path.write_text(json.dumps(stopped) + "\n")
    assert "| ours | 700 ms" in page_of(results)


def test_last_measurement_counts_if_a_run_measures_twice(tmp_path: Path) -> None:
    results = Results("adam", tmp_path, quick=False)
    for seconds in (0.3, 0.4):
        results.add(Row(variant="ours", quantity="update", unit="s", samples=[seconds]))
    page = page_of(tmp_path)
    assert "| ours | 400 ms |" in page
    assert "300 ms" not in page


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


def test_every_target_names_a_quantity_that_its_benchmark_measures() -> None:
    """Check against rows of the CPU, since rows of all benchmarks are committed: rows of a GPU differ in sizes only."""
    rows = [row for runs in last_runs(RESULTS).values() for run in runs[-1:] for row in run]
    for target in TARGETS:
        moved = [{**row, "gpu": "a GPU" if target.on_gpu else None} for row in rows]
        assert target.check(moved) is not None, target.description


def test_an_aim_for_the_bits_is_missed_if_one_variant_differs_from_stock(tmp_path: Path) -> None:
    results = Results("adam", tmp_path, quick=False)
    for variant, same in (("ours", True), ("ours, all on the CPU", False), ("ZenFlow", False)):
        results.add(Row(variant=variant, quantity=BIT_IDENTICAL, value=same))
    rows = [{**row, "cores": 2, "gpu": None} for row in results.rows]
    verdict = SAME_BITS.check(rows)
    assert verdict is not None
    assert (verdict.is_met, str(verdict)) == (False, "no, the worst of 2 results (variant: ours, all on the CPU)")
    assert SAME_BITS.check([row for row in rows if row["variant"] == "ZenFlow"]) is None


def test_runs_on_gpus_come_first_and_all_later_ones_are_folded(tmp_path: Path) -> None:
    results = Results("adam", tmp_path, quick=False)
    results.add(Row(variant="ours", quantity="update", unit="s", samples=[1.0]))
    (row,) = results.rows
    machines = (
        {"cpu": "an old CPU", "date": "2026-01-01"},
        {"cpu": "a CPU", "date": "2026-01-02"},
        {"cpu": "a CPU", "gpu": "an old GPU", "date": "2026-01-03"},
        {"cpu": "a CPU", "gpu": "a GPU", "date": "2026-01-04"},
    )
    rows = [{**row, "gpu": None, "cores": 2, **machine} for machine in machines]
    results.path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    section = page_of(tmp_path).split("## adam: ")[1].split("\n## ")[0]
    found = re.findall("Measured on (.*) with 2 cores, (.*), at commit", section)
    assert found == [
        ("a GPU with a CPU", "2026-01-04"),
        ("an old GPU with a CPU", "2026-01-03"),
        ("a CPU", "2026-01-02"),
    ]
    assert re.findall("<summary>(.*)</summary>", section) == [
        "Measured on an old GPU with a CPU with 2 cores",
        "Measured on a CPU with 2 cores",
    ]


def test_page_shows_the_last_run_and_no_quick_run(results: Path) -> None:
    path = results / "adam.jsonl"
    last = {**json.loads(path.read_text().splitlines()[0]), "date": "2999-01-01T00:00:00+00:00", "median": 0.7}
    end = {**last, "quantity": COMPLETE, "value": True}
    quick = {**last, "date": "2999-02-01T00:00:00+00:00", "quick": True, "median": 0.9}
    path.write_text(path.read_text() + "".join(json.dumps(row) + "\n" for row in (last, end, quick)))
    page = page_of(results)
    assert re.findall(r"\| ours \| (\d+) ms", page) == ["700"]
