"""Check that checkpoints move between the device and the CPU accelerator, and between stock and the plugin."""

from __future__ import annotations

import pytest

from tests.launch import run_ranks

TRANSFERS = [
    f"{saved_by} on {saved_on} to {loaded_by} on {loaded_on}"
    for saved_on, loaded_on in (("CPU", "device"), ("device", "CPU"), ("device", "device"))
    for saved_by, loaded_by in (("stock", "ours"), ("ours", "stock"))
]


@pytest.mark.promise("P1", "P4")
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_checkpoint_of_either_accelerator_resumes_on_the_other_with_the_bits_of_stock(world_size: int) -> None:
    program = "tests.software_gpu.training.checkpoint_transfer_ranks"
    for finished in run_ranks(world_size, ["-m", program], timeout_s=300):
        assert finished.returncode == 0, finished.output[-5000:]
        on_cpu, on_device, *transfers = finished.answers()
        for files in (on_cpu, on_device):
            assert len(files["stock"]) >= 20
            # Resident states are written back before they are saved, so that all are in host memory as with stock.
            assert files["ours"] == files["stock"]
        assert [answer["transfer"] for answer in transfers] == TRANSFERS
        for answer in transfers:
            assert answer["differences"] == [], answer["transfer"]
