"""Check the steps of a few layers that a full profile trains."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from deep_opt_states.profiler import training_step
from deep_opt_states.profiler.ranks import Ranks
from deep_opt_states.profiler.training_step import Layers, count_modules, make_layers, measure_training
from perf_model.prediction.hardware import TRAINING_QUANTITIES
from perf_model.training_run.model import ModelShape, ParameterShape
from tests.launch import run_ranks


@pytest.mark.parametrize(("accelerator", "num_ranks"), [("cpu", 1), ("cpu", 2), ("software GPU", 1)])
def test_engines_train_on_each_accelerator_and_measure_every_quantity(accelerator: str, num_ranks: int) -> None:
    finished = run_ranks(num_ranks, ["-m", "tests.profiler.training_step_ranks", accelerator], timeout_s=200)
    for each in finished:
        assert each.returncode == 0, each.output[-3000:]
        (found,) = each.answers()
        assert found.keys() == TRAINING_QUANTITIES.keys()
        assert found.pop("module_gradients_s") >= 0
        assert found.pop("module_step_s") >= 0
        assert min(found.values()) > 0


def test_modules_are_counted_as_in_predictions() -> None:
    model = make_layers(Layers(width=64, tokens=16))
    tensors = tuple(ParameterShape(name, each.numel(), each.numel(), False) for name, each in model.named_parameters())
    sizes = dict.fromkeys(
        ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "scores_width"), 1
    )
    assert count_modules(model) == ModelShape(name="layers", **sizes, tensors=tensors).modules == 8 * 7


def of_process(monkeypatch: pytest.MonkeyPatch, code: str) -> dict[str, str | None]:
    """Return the reasons of the waived quantities if each rank's process runs ``code``."""
    run = subprocess.run

    def replaced(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return run([sys.executable, "-c", code, command[-1]], **options)

    monkeypatch.setattr(training_step.subprocess, "run", replaced)
    return {name: found.waived for name, found in measure_training(Ranks()).items()}


def test_a_run_that_fails_waives_its_quantities_with_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    waived = of_process(monkeypatch, "raise OSError('no compiler')")
    reason = "training a few layers with DeepSpeed failed (OSError: no compiler)"
    assert waived == dict.fromkeys(TRAINING_QUANTITIES, reason)


def test_a_run_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_step, "TIMEOUT_S", 0.2)
    waived = of_process(monkeypatch, "import time; time.sleep(60)")
    assert waived == dict.fromkeys(TRAINING_QUANTITIES, "training a few layers took more than 0 s")


@pytest.mark.parametrize(("module_s", "is_waived"), [(6e-4, False), (6e-1, True)])
def test_implausible_seconds_are_waived(module_s: float, is_waived: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {name: 1e9 if name.endswith("_per_s") else module_s for name in TRAINING_QUANTITIES}
    waived = of_process(monkeypatch, f"import sys, json; json.dump({values!r}, open(sys.argv[1], 'w'))")
    assert all((reason is not None) == is_waived for reason in waived.values())
    assert all(reason is None or reason.startswith("implausible: module_") for reason in waived.values())
