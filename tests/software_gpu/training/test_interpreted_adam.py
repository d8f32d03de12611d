"""Check that a model trains to stock's bits if each update on the device interprets the PTX of the Triton kernel."""

from __future__ import annotations

import pytest

from tests.launch import run_ranks
from tests.software_gpu.training.interpreted_adam_ranks import BLOCK, CASE

ON_DEVICE = sum(rule["states"] != "cpu" for rule in BLOCK["placement"])


@pytest.mark.promise("P1", "P2")
def test_training_with_interpreted_ptx_on_the_device_has_the_bits_of_stock() -> None:
    (finished,) = run_ranks(1, ["-m", "tests.software_gpu.training.interpreted_adam_ranks"], timeout_s=300)
    assert finished.returncode == 0, finished.output[-5000:]
    (found,) = finished.answers()
    assert found["differences"] == []
    # Persistent parameters are updated by launches of their own.
    assert found["launches"] >= ON_DEVICE * CASE.steps
