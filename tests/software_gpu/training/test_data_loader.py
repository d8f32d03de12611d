"""Check that page-locked batches of forked workers, copied without blocking, train on the device to stock's bits."""

from __future__ import annotations

import pytest

from tests.launch import run_ranks


@pytest.mark.promise("P1")
def test_training_on_the_device_from_forked_workers_has_the_bits_of_stock() -> None:
    (finished,) = run_ranks(1, ["-m", "tests.software_gpu.training.data_loader_ranks"], timeout_s=200)
    assert finished.returncode == 0, finished.output[-5000:]
    answers = finished.answers()
    assert [(answer["adversary"], answer["plugin"]) for answer in answers] == [
        ("plain", False),
        ("plain", True),
        ("lazy", False),
        ("lazy", True),
    ]
    for answer in answers:
        assert answer["differences"] == []
        assert answer["page-locked"] == [True] * 6
        assert answer["pending"] == [False, answer["plugin"]], "workers must be forked while an update is in flight"
