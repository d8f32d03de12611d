"""Test whole runs of the frameworks on two ranks: evaluation, the best model, generation, and the log of the plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.checkpoints import contents, differences
from tests.frameworks.launchers import two_ranks
from tests.frameworks.screen import OURS, check_lines_of_engines, lines_of
from tests.launch import Finished

STOCK, PLUGIN = "DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"
RUNS = ["Trainer", "LLaMA-Factory", "axolotl", "axolotl without its key", "ms-swift", "Accelerate", "OpenRLHF"]
GATHERING = ["LLaMA-Factory", "axolotl", "axolotl without its key", "ms-swift"]
"""The runs whose config gathers the model's weights, so that the Trainer saves them in the format ``safetensors``."""

# One worker of pytest-xdist runs all tests, so that the fixture is created once.
pytestmark = [pytest.mark.xdist_group("whole runs"), pytest.mark.thorough]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole_runs")


@pytest.fixture(scope="module")
def whole_runs(saved: Path) -> list[Finished]:
    return two_ranks("tests.frameworks.whole_runs", saved)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.promise("P1", "P3", "P4")
def test_a_whole_run_reports_and_saves_the_bits_of_stock(name: str, whole_runs: list[Finished], saved: Path) -> None:
    for finished in whole_runs:
        stock, plugin = (found for found in finished.answers() if found["run"] == name)
        assert (stock["optimizers"], plugin["optimizers"]) == ([STOCK], [PLUGIN])
        assert plugin["report"] == stock["report"]
        check_report(name, stock["report"])
    for pattern in ("*_states.pt", "*.safetensors"):
        assert differences(saved / name / "plugin", saved / name / "stock", pattern) == []
    assert any("exp_avg_sq" in key for key in contents(saved / name / "stock"))
    assert bool(contents(saved / name / "stock", "*.safetensors")) == (name in GATHERING)


def check_report(name: str, report: dict[str, Any]) -> None:
    """Check that stock's run did all that the name of the run promises."""
    if name == "OpenRLHF":
        assert len({tuple(losses) for losses in report["losses"]}) == 4
    elif name != "Accelerate":
        assert report["steps"] == 4
        evaluated = {
            f"checkpoint-{entry['step']}": entry["eval_loss"] for entry in report["history"] if "eval_loss" in entry
        }
        assert list(evaluated) == [f"checkpoint-{step}" for step in (1, 2, 3, 4)]
        assert report["best"] == min(evaluated, key=evaluated.__getitem__)
        # The model at the end of training has another loss than the best one, which is loaded then.
        assert report["loss of the best"] == evaluated[report["best"]] < evaluated["checkpoint-4"]
        assert len({entry["loss"] for entry in report["history"] if "loss" in entry}) == 4
    else:
        assert len(report["losses"]) == 4
        assert all(len(tokens[0]) == 6 for tokens in report["generated"])


@pytest.mark.parametrize("name", RUNS)
def test_rank_0_prints_the_cores_and_the_plan_of_each_engine(name: str, whole_runs: list[Finished]) -> None:
    """Check the lines of the plugin. ``test_first_lines.py`` checks how many lines precede them in a process."""
    first, second = whole_runs
    assert OURS not in second.output
    off = [line for line in lines_of(first, name, "stock") if OURS in line]
    # It is logged once per process.
    assert len(off) == (name == RUNS[0])
    assert all("switched off by DEEP_OPT_STATES=0: training with stock DeepSpeed" in line for line in off)
    # OpenRLHF's actor and critic have an engine each.
    check_lines_of_engines(lines_of(first, name, "plugin")[:10], engines=2 if name == "OpenRLHF" else 1)
