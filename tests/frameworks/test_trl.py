"""Test TRL's trainers on two ranks: the DeepSpeed JSON alone enables the plugin, and checkpoints have stock's bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.checkpoints import contents, differences
from tests.frameworks.launchers import two_ranks
from tests.launch import Finished

STOCK, PLUGIN = "DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"
NO_OPTIMIZER = "DeepSpeedZeRoOffload"
"""The class that stock DeepSpeed creates for ZeRO-3 without an optimizer."""

REFERENCE = "an engine without an optimizer runs as stock DeepSpeed"
"""The line about the engine of a reference model."""

STEPS = 3
TRAINERS = ["SFT", "SFT with LoRA", "DPO", "DPO without reference", "DPO with LoRA", "GRPO"]

# One worker of pytest-xdist runs all tests, so that the fixture is created once.
pytestmark = [pytest.mark.xdist_group("trl"), pytest.mark.thorough]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trl")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Finished]:
    return two_ranks("tests.frameworks.trl_trainers", folder)


@pytest.fixture(scope="module")
def answers(ranks: list[Finished]) -> list[list[dict[str, Any]]]:
    return [finished.answers() for finished in ranks]


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.promise("P1", "P3")
def test_every_trainer_saves_the_bits_of_stock(name: str, answers: list[list[dict[str, Any]]], folder: Path) -> None:
    reference = NO_OPTIMIZER if name in ("DPO", "DPO without reference") else None
    engines = [reference] if reference else []
    same = {"trainer": name, "reference": reference, "steps": STEPS, "several sub-groups": True}
    stock = {**same, "variant": "stock", "engines": [*engines, STOCK]}
    plugin = {**same, "variant": "plugin", "engines": [*engines, PLUGIN]}
    for rank in answers:
        assert [run for run in rank if run.get("trainer") == name] == [stock, plugin]
    assert any("exp_avg_sq" in key for key in contents(folder / name / "stock"))
    assert differences(folder / name / "plugin", folder / name / "stock") == []


def test_the_log_has_one_line_about_each_reference_model(ranks: list[Finished]) -> None:
    output = "".join(finished.output for finished in ranks)
    assert output.count(REFERENCE) == 2


def test_an_optimizer_that_is_not_adam_is_refused_before_the_first_update(answers: list[list[dict[str, Any]]]) -> None:
    """Check the error for Adafactor, which Accelerate replaces by DeepSpeedCPUAdam with Adafactor's pair as eps."""
    for rank in answers:
        refused = rank[-1]
        assert refused["error"] == "Unsupported"
        assert refused["steps"] == 0
        assert "found eps=(1e-30, 0.001) in param group 0" in refused["message"]
        assert 'choose "adamw_torch"' in refused["message"]
