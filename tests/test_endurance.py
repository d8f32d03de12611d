"""Check that some hundred steps keep no memory and no files, and that a small leak is found."""

from __future__ import annotations

import pytest

from tests import endurance

STEPS = 160


@pytest.mark.promise("P6")
def test_training_keeps_no_more_tensors_accelerator_memory_and_files() -> None:
    """Check it while units move, steps are skipped, and the model is evaluated, saved and loaded."""
    found = endurance.train(STEPS, 1, "none")
    assert found.problems == ()
    assert found.steps == STEPS


def test_a_small_tensor_or_file_kept_every_ten_steps_is_found() -> None:
    found = endurance.train(STEPS, 1, "every")
    grown = {problem.partition(" grows")[0] for problem in found.problems}
    assert grown == {"accelerator memory, bytes", "tensors", "open files", "temporary files"}


@pytest.mark.thorough
@pytest.mark.parametrize("leak", ["none", "host"])
def test_host_memory_does_not_grow_in_thousands_of_steps_without_a_leak(leak: str) -> None:
    found = endurance.train(4_000, 1, leak)
    assert any("host memory, bytes" in problem for problem in found.problems) == (leak == "host"), found
