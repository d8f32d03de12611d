"""Check that Hugging Face's Trainer trains, evaluates, saves and resumes on the device with the bits of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import run_ranks

STOCK, OURS = "DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"


@pytest.mark.promise("P1", "P3", "P4")
def test_the_trainer_has_the_bits_of_stock_on_the_cpu_also_after_a_checkpoint_of_the_other(tmp_path: Path) -> None:
    (finished,) = run_ranks(1, ["-m", "tests.software_gpu.training.trainer_ranks", str(tmp_path)], timeout_s=300)
    assert finished.returncode == 0, finished.output[-5000:]
    answers = {answer["name"]: answer for answer in finished.answers()}
    assert {name: answer["class"] for name, answer in answers.items()} == {
        "stock on the device": STOCK,
        "plugin on the device": OURS,
        "plugin on the device, from stock on the CPU": OURS,
        "stock on the CPU, from the plugin on the device": STOCK,
    }
    for name, answer in answers.items():
        assert answer["differences"] == [], name
