"""The benchmarks run where there is no GPU, say what they waive, and every exact arm has stock's bits."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.harness import arms
from benchmarks.harness.aims import AIMS
from benchmarks.harness.picture import draw
from benchmarks.harness.report import last_runs, render
from benchmarks.harness.rows import COMPLETE, RESULTS, Results, Row, told
from benchmarks.harness.setting import Setting
from benchmarks.harness.sizes import with_default_sub_groups
from benchmarks.harness.suite import BENCHMARKS
from benchmarks.harness.turns import Turn, Waits
from perf_model.prediction.timeline import Phase, PhaseSpan
from tests.launch import run_ranks
from tests.tiers import thorough

UPDATE = ("update", "update exposed")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    results = Results("adam", tmp_path, quick=False)
    results.add(Row(arm="ours", quantity="update", unit="s", samples=(0.2, 0.1, 0.3, 0.4, 0.5), setting={"threads": 2}))
    results.add(Row(arm="ours", quantity="stock's bits", said=True, claimed=True, setting={"threads": 2}))
    results.add(Row(arm="GPU", quantity="update", waived="no GPU | none"))
    results.finish()
    return tmp_path


def page_of(folder: Path) -> str:
    return render(last_runs(folder))


def quickly(name: str, folder: Path) -> list[dict[str, Any]]:
    """Its rows."""
    arguments = ["-m", "benchmarks", name, "--quick", "--output", str(folder)]
    (finished,) = run_ranks(1, arguments, timeout_s=250)
    assert finished.returncode == 0, finished.output[-4000:]
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", [thorough("update_phase"), "overlap"])
def test_every_exact_arm_has_the_bits_of_stock(name: str, tmp_path: Path) -> None:
    rows = quickly(name, tmp_path)
    assert not [row for row in rows if row.get("failed")]
    bits = {row["arm"]: row["said"] for row in rows if row["quantity"] == "stock's bits"}
    seconds = {row["arm"]: row["median"] for row in rows if row["quantity"] in UPDATE and "median" in row}
    assert len(bits) >= 5
    assert bits.keys() <= seconds.keys()
    assert all(value > 0 for value in seconds.values())
    # What forward and backward wait for an update is taken from them once.
    assert not [row for row in rows if row.get("unit") == "s" and row["p20"] < 0]
    assert {arm for arm, same in bits.items() if not same} <= {"Twin-Flow", "stock, cores bound", "stock, no clipping"}
    classes = {row["arm"]: row["said"].split()[0] for row in rows if row["quantity"] == "is"}
    assert classes.keys() == bits.keys()
    assert classes["stock"] == "DeepSpeedZeroOptimizer_Stage3"
    waived = {row["arm"]: row["waived"] for row in rows if "waived" in row}
    if name == "update_phase":
        assert set(waived) == {"SuperOffload", "SuperOffload, no clipping", "ZenFlow (approximate)"}
        assert set(waived.values()) == {"runs on CUDA only, says DeepSpeed 0.19.8"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    ["adam", "training_step", "ablation", "trace", "exactness", "model_error", "overhead", "planner", "scaling"],
)
def test_it_runs(name: str, tmp_path: Path) -> None:
    rows = quickly(name, tmp_path)
    assert any("median" in row for row in rows)
    assert not [row for row in rows if row.get("failed")]


def test_rows_say_where_and_when_and_the_spread(results: Path) -> None:
    first, said, waived, _ = map(json.loads, (results / "adam.jsonl").read_text().splitlines())
    assert {"date", "commit", "cpu", "cores", "gpu", "versions", "benchmark", "quick"} < first.keys()
    assert (first["median"], first["p20"], first["p80"], first["samples"]) == (0.3, 0.2, 0.4, 5)
    assert (first["unit"], first["setting"], said["said"], waived["waived"]) == (
        "s",
        {"threads": 2},
        True,
        "no GPU | none",
    )
    assert told(first) == ("300 ms", "200 ms to 400 ms")
    assert "failed" not in said


def test_a_claim_that_does_not_hold_has_failed() -> None:
    assert Row(arm="ours", quantity="stock's bits", said=False, claimed=True).to_json()["failed"] is True
    assert "failed" not in Row(arm="ZenFlow", quantity="stock's bits", said=False).to_json()


def test_every_number_of_the_page_is_of_a_row(results: Path) -> None:
    page = page_of(results)
    assert "threads 2:\n\n| arm | update | stock's bits |\n" in page
    assert "| ours | 300 ms (200 ms to 400 ms) | yes |" in page
    assert "- Waived, no GPU | none: GPU" in page
    for name in BENCHMARKS:
        assert f"## {name}: " in page
        assert (f"**Unmeasured**: `python -m benchmarks {name}`" in page) == (name != "adam")


@pytest.mark.parametrize(("median", "said"), [(1.7, "| holds |"), (1.5, "| **falls short** |")])
def test_aims_are_judged_by_the_rows(median: float, said: str, tmp_path: Path) -> None:
    arm = "ours, all on the CPU"
    results = Results("update_phase", tmp_path, quick=False)
    setting = {"sub_group_size": 10_000_000}
    for name, samples in (("stock", [1.0]), (arm, [median, 9.0, 0.1])):
        row = Row(arm=name, quantity="updates faster than stock", unit="times", samples=samples, setting=setting)
        results.add(row)
    for size, most in ((1, 9.0), (10_000_000, 1.42)):
        of = {"arm": arm, "setting": {"sub_group_size": size}}
        results.add(Row(quantity="stock's bytes over its", unit="times", samples=[most], **of))
    page = page_of(tmp_path)
    (line,) = (line for line in page.splitlines() if "1.6 times as fast" in line)
    # Other machines answer other questions.
    answers = results.rows[0]["gpu"] is None and results.rows[0]["cores"] == 2
    assert (said in line) == answers
    assert ("stock's bytes over its: 1.42x" in line) == (answers and median == 1.5)
    assert page.count("**unmeasured**") == len(AIMS) - answers


def test_the_farthest_setting_counts(tmp_path: Path) -> None:
    results = Results("model_error", tmp_path, quick=False)
    results.rows = []
    for size, error in ((1, 0.02), (4, -0.3), (8, 0.2)):
        setting = {"sub_group_size": size}
        row = Row(arm="planned", quantity="error of the prediction", unit="share", samples=[error], setting=setting)
        results.add(row)
    (aim,) = (its for its in AIMS if its.quantity == "error of the prediction")
    verdict = aim.judge([{**row, "gpu": "a GPU"} for row in results.rows])
    assert verdict is not None
    assert (verdict.holds, str(verdict)) == (False, "-30%, the farthest of 3: planned")
    assert aim.judge([]) is None


def test_the_page_that_is_committed_is_of_the_rows_that_are() -> None:
    assert (RESULTS.parent / "RESULTS.md").read_text() == page_of(RESULTS), "python -m benchmarks report"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_rows_can_be_drawn(path: Path, tmp_path: Path) -> None:
    picture = importlib.import_module(f"benchmarks.{path.stem}").PICTURE
    for rows in last_runs(RESULTS)[path.stem]:
        drawn = draw(rows, tmp_path, picture)
        if drawn is None:
            assert any("waived" in row for row in rows)
            continue
        assert f"![{path.stem}](results/{drawn.name})" in page_of(RESULTS)
        assert drawn.read_bytes().startswith(b"\x89PNG")
        assert drawn.stat().st_size > 10_000, "not an empty figure"


def test_a_trace_is_kept_beside_the_rows(tmp_path: Path) -> None:
    results = Results("trace", tmp_path, quick=False)
    results.add(Row(arm="ours, all on the CPU", quantity="trace", trace=b"compressed"))
    name = results.rows[0]["said"]
    assert name.startswith("trace-")
    assert name.endswith("-ours-all-on-the-cpu.json.gz")
    assert (tmp_path / name).read_bytes() == b"compressed"
    assert f"[trace](results/{name})" in page_of(tmp_path)


def test_a_run_that_was_stopped_does_not_hide_one_that_was_not(results: Path) -> None:
    path = results / "adam.jsonl"
    stopped = {**json.loads(path.read_text().splitlines()[0]), "date": "2999-01-01T00:00:00+00:00", "median": 0.7}
    path.write_text(path.read_text() + json.dumps(stopped) + "\n")
    assert "| ours | 300 ms" in page_of(results)
    path.write_text(json.dumps(stopped) + "\n")
    assert "| ours | 700 ms" in page_of(results)


def test_what_is_measured_twice_counts_as_it_was_last(tmp_path: Path) -> None:
    results = Results("adam", tmp_path, quick=False)
    for seconds in (0.3, 0.4):
        results.add(Row(arm="ours", quantity="update", unit="s", samples=[seconds]))
    page = page_of(tmp_path)
    assert "| ours | 400 ms |" in page
    assert "300 ms" not in page


SETTING = Setting(layers=4, width=1024, context=64, micro_batch=1, sub_group_size=10_000_000)


def test_arms_are_configured_as_they_are_called() -> None:
    """DeepSpeed clips to 1.0 where nothing is said."""
    assert arms.SUPER_UNCLIPPED.configure(SETTING)["gradient_clipping"] == 0.0
    assert arms.STOCK.configure(SETTING)["gradient_clipping"] == 1.0
    assert "offload_optimizer" not in arms.NO_OFFLOAD.configure(SETTING)["zero_optimization"]
    by_default = arms.STOCK.configure(with_default_sub_groups(SETTING))["zero_optimization"]
    assert by_default["sub_group_size"] == 10**9
    memory = arms.PLANNED.configure(SETTING)["deep_optimizer_states"]["gpu_memory_gb"]
    assert memory * 1e9 == pytest.approx(24 * 10_000_000 + 2 * SETTING.parameters)
    # As many of the six sub-groups as fit that, with 16 bytes a parameter.
    ratio = arms.twin_flow(SETTING).configure(SETTING)["zero_optimization"]["offload_optimizer"]["ratio"]
    assert int((1 - ratio) * 6) == 2


def test_no_offload_is_waived_where_it_does_not_fit() -> None:
    assert arms.NO_OFFLOAD.waived(SETTING) is None
    huge = replace(SETTING, layers=1000, width=16384)
    assert arms.NO_OFFLOAD.waived(huge) == "does not fit"


@pytest.mark.parametrize(
    ("arm", "claim"),
    [
        (replace(arms.STOCK, name="stock that clips otherwise", clipping=0.5), "clips to 1.0"),
        (replace(arms.STOCK, name="ours, not there", optimizer_class=arms.OURS), "the optimizer is"),
        (replace(arms.ALL_CPU, name="stock's kernel, not there", kernel="StockAdam"), "the CPU updates by FusedAdam"),
        (replace(arms.STOCK, name="Twin-Flow, not there", offload={"ratio": 0.5}), "ratio 1.0"),
    ],
    ids=lambda its: its.name if isinstance(its, arms.Arm) else "",
)
def test_an_engine_that_is_not_its_arm_s_is_refused(arm: arms.Arm, claim: str) -> None:
    named = replace(arms.STOCK if arm.block is None else arms.ALL_CPU, name=arm.name)
    with pytest.raises(AssertionError, match=claim):
        arm.check(Engine(named))


class Engine:
    """What ``check`` looks at of one that ``arm`` is right about."""

    def __init__(self, arm: arms.Arm) -> None:
        groups, config = [None] * 6, SimpleNamespace(overlap_backward=False, overlap_forward=False)
        adam = type(arm.kernel or "None", (), {})()
        inner = type(arm.inner, (), {})()
        attributes = {
            "optimizer": inner,
            "partial_offload": 1.0,
            "fp16_groups": groups,
            "_config": config,
            "_adam": adam,
        }
        self.optimizer = type(arm.optimizer_class, (), attributes)()
        assert arm.check(self).startswith(arm.optimizer_class)

    def gradient_clipping(self) -> float:
        return 1.0

    def zero_overlap_comm(self) -> bool:
        return True

    def zero_offload_optimizer(self) -> Any:
        return SimpleNamespace(pin_memory=True)


def test_waits_are_taken_from_the_phase_that_they_are_in() -> None:
    """Two updates that go on in the next forward, and end in its backward; a third that ends with ``step()``."""
    exposure, told = SimpleNamespace(count=0), []
    optimizer = SimpleNamespace(
        _exposure=exposure, report=SimpleNamespace(updated=lambda phases, timeline: told.append(phases))
    )
    waits = Waits()
    waits.watch(optimizer)
    for in_step, by_forward, end in ((2, 3, 4), (1, 4, 4), (1, 1, 1)):
        exposure.count = in_step
        waits.stepped()
        exposure.count = by_forward
        if in_step < by_forward:
            waits.forwarded()
            # Of the same step's second micro-batch.
            exposure.count = end
            waits.forwarded()
        seconds = [0.1 * 2**number for number in range(end)]
        spans = [PhaseSpan(Phase.EXPOSED, 10.0 * at, 10.0 * at + its) for at, its in enumerate(seconds)]
        optimizer.report.updated(
            (PhaseSpan(Phase.BACKWARD, -1.0, 0.0), *spans),
            lambda: SimpleNamespace(hidden_s=lambda exposed_s: exposed_s),
        )
    turn = Turn(arms.OURS_AS_IT_IS, SETTING)
    turn.step_s, turn.forward_s, turn.backward_s = [1.0, 1.0, 1.0], [3.0, 3.0, 3.0], [5.0, 5.0, 5.0]
    waits.account(turn)
    # 0.1 and 0.2 in the first step, 0.4 in the forward and 0.8 in the backward after it; and so on.
    assert turn.exposed_s == pytest.approx([1.0 + 0.4 + 0.8, 1.0 + 0.2 + 0.4 + 0.8, 1.0])
    assert turn.forward_s == pytest.approx([3.0, 3.0 - 0.4, 3.0 - 0.2 - 0.4 - 0.8])
    assert turn.backward_s == pytest.approx([5.0, 5.0 - 0.8, 5.0])
    assert turn.hidden_s == pytest.approx([1.5, 1.5, 0.1])
    assert len(told) == 3


def test_every_aim_asks_for_what_a_benchmark_tells() -> None:
    """On the CPU, where rows of all of them are committed; the GPU's are of other sizes only."""
    for aim in AIMS:
        rows = [{**row, "gpu": "a GPU" if aim.on_gpu else None} for row in last_runs(RESULTS)[aim.benchmark][0]]
        assert aim.judge(rows) is not None, aim.what


def test_quick_runs_measure_nothing_and_the_last_run_counts(results: Path) -> None:
    path = results / "adam.jsonl"
    last = {**json.loads(path.read_text().splitlines()[0]), "date": "2999-01-01T00:00:00+00:00", "median": 0.7}
    end = {**last, "quantity": COMPLETE, "said": True}
    quick = {**last, "date": "2999-02-01T00:00:00+00:00", "quick": True, "median": 0.9}
    path.write_text(path.read_text() + "".join(json.dumps(row) + "\n" for row in (last, end, quick)))
    page = page_of(results)
    assert re.findall(r"\| ours \| (\d+) ms", page) == ["700"]
