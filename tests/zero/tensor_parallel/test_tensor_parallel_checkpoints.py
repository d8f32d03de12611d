"""Check that checkpoints beside tensor parallelism are exchanged with stock, and that one rank loads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import run_ranks
from tests.zero.tensor_parallel.checkpoint_jobs import job_stages


@pytest.mark.promise("P1", "P4")
@pytest.mark.parametrize("jobs", ["quick", pytest.param("all", marks=pytest.mark.thorough)])
def test_checkpoints_beside_tensor_parallelism_are_those_of_stock(jobs: str, tmp_path: Path) -> None:
    """Check it with another placement, and with one rank that loads universal checkpoints of two and four ranks."""
    script = ["-m", "tests.zero.tensor_parallel.checkpoint_jobs", str(tmp_path), jobs]
    (finished,) = run_ranks(1, script, timeout_s=1800)
    assert finished.returncode == 0, finished.output[-4000:]
    problems = {found["job"]: found["problem"] for found in finished.answers()}
    assert problems == dict.fromkeys((name for stage in job_stages(jobs) for name in stage), "")
