"""Test that the examples are six scripts and three configs, and that four of the scripts train."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from deep_opt_states.config import parse_config
from examples.common.demo_report import lag_sentence
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Partition
from perf_model.units import seconds
from tests.launch import REPOSITORY, environment, run_ranks


def test_only_the_six_scripts_lie_next_to_the_configs() -> None:
    scripts = {"accelerated.py", "demo.py", "hf_trainer.py", "pseudo_to_real.py", "train.py", "with_lightning.py"}
    configs = {"ds_config.json", "ds_config_tp.json", "mixture_of_experts.json"}
    assert {path.name for path in (REPOSITORY / "examples").iterdir() if path.is_file()} == scripts | configs


def test_the_rules_for_a_mixture_of_experts_are_for_the_names_of_such_a_model() -> None:
    names = [
        "model.embed_tokens.weight",
        *(f"model.layers.0.{name}.weight" for name in ("self_attn.q_proj", "mlp.gate", "mlp.experts.0.up_proj")),
        "lm_head.weight",
    ]
    config = parse_config(json.loads((REPOSITORY / "examples" / "mixture_of_experts.json").read_text()))
    assert config is not None
    config.check_names(names)
    workload = config.workload([[Partition(name, 1024) for name in names]])
    assert [unit.fixed for unit in workload.units] == [None, None, Placement.CPU, Placement.RESIDENT]


@pytest.mark.thorough
def test_the_demo_finds_equal_bits_and_faster_emulated_iterations_and_draws_an_update() -> None:
    output = REPOSITORY / "demo-output"
    # Of an earlier run.
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "examples/demo.py"]
    finished = subprocess.run(command, cwd=REPOSITORY, env=environment(), text=True, capture_output=True, timeout=600)
    assert finished.returncode == 0, finished.stderr[-3000:]
    results = json.loads((output / "emulated.json").read_text())
    assert results["bit_identical"]
    # EMULATED seconds, of the machine whose rates are given: this is no timing of the machine that runs the test.
    stock_s, plugin_s = (median(results["arms"][name]["iteration_s"]) for name in ("stock", "plugin"))
    assert stock_s / plugin_s > 1
    # The plan streams.
    assert re.search(r"[1-9]\d* streamed", results["plan"])
    assert (output / "timeline.png").read_bytes().startswith(b"\x89PNG")
    page = (Path(results["folder"]) / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    check_figures_agree(results, page, finished.stdout)


def check_figures_agree(results: dict[str, Any], page: str, printed: str) -> None:
    """Check that the terminal and the page show the same seconds of the plugin, and the verdict."""
    shown = dict(re.findall(r'<th scope="row">([^<]*)</th>\s*<td class="number"><data value="[^"]*">([^<]*)<', page))
    for row, key in (("iteration", "iteration_s"), ("exposed: the model waits", "exposed_s")):
        typical = seconds(median(results["arms"]["plugin"][key]))
        assert shown[row] == typical
        assert typical in printed
    (verdict,) = re.findall(r'<p class="verdict">(.*)</p>', page)
    assert verdict.startswith("EMULATED: The update costs ")
    assert "".join(html.unescape(verdict).split()) in "".join(printed.split())


@pytest.mark.parametrize(
    ("lag_s", "slowest_s", "text"), [(0.04, 2.0, "fast enough"), (0.3, 2.0, "too busy"), (0.0, 2.5, "too busy")]
)
def test_the_demo_says_whether_the_machine_was_too_busy_for_its_emulated_seconds(
    lag_s: float, slowest_s: float, text: str
) -> None:
    arms = {"stock": {"iteration_s": [2.0, 2.02, slowest_s]}, "plugin": {"iteration_s": [1.0, 1.0]}}
    assert text in lag_sentence({"arms": arms, "lag_s": [0.0, lag_s]})


@pytest.mark.thorough
def test_the_plain_script_trains_with_its_config() -> None:
    """Check it on two ranks. The script does not mention the plugin: the JSON config enables it."""
    assert "deep_opt" not in (REPOSITORY / "examples" / "train.py").read_text()
    script = ["examples/train.py", "--deepspeed_config", "examples/ds_config.json", "--steps", "2"]
    first, second = run_ranks(2, script, timeout_s=180)
    for finished in (first, second):
        assert "Traceback" not in finished.output, finished.output[-3000:]
    assert re.search(r"\[deep_opt_states\] \d+ units, .* [1-9]\d* streamed", first.output)
    assert re.findall(r"step +(\d+) +loss", first.output) == ["0", "1"]


@pytest.mark.thorough
def test_the_trainer_trains_beside_autotp_with_its_config(tmp_path: Path) -> None:
    """Check it on two ranks, which share one model."""
    options = ["--deepspeed_config", "examples/ds_config_tp.json", "--output", str(tmp_path)]
    steps = ["--steps", "2", "--save_every", "2"]
    first, second = run_ranks(2, ["examples/hf_trainer.py", *options, *steps], timeout_s=300)
    for finished in (first, second):
        assert finished.returncode == 0, finished.output[-3000:]
    assert "'train_loss'" in first.output, first.output[-3000:]
    assert re.search(r"\[deep_opt_states\] \d+ units, .* [1-9]\d* streamed", first.output)
    saved = {path.name for path in (tmp_path / "checkpoint-2" / "global_step2").iterdir()}
    shards = {f"zero_pp_rank_0_mp_rank_{rank:02}_model_states.pt" for rank in range(2)}
    assert shards <= saved, "each rank is the only one of its shard"


@pytest.mark.thorough
def test_the_pseudo_to_real_script_trains_both_ways_and_draws_the_losses(tmp_path: Path) -> None:
    """Check that it runs. It raises if the delinked model does not have the loss of the shared one."""
    script = ["examples/pseudo_to_real.py", "--quick", "--output", str(tmp_path)]
    (finished,) = run_ranks(1, script, timeout_s=300)
    assert finished.returncode == 0, finished.output[-3000:]
    curves = json.loads((tmp_path / "losses.json").read_text())
    assert [(curve["name"], curve["steps"][-1]) for curve in curves] == [("unshared", 24), ("Pseudo-to-Real", 24)]
    assert all(curve["losses"][-1] < curve["losses"][0] - 0.5 for curve in curves)
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
