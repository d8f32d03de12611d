"""The benchmark of what is seen of the update runs where there is no GPU, and compares the bits of its arms."""

from __future__ import annotations

import json
from pathlib import Path

from tests.launch import run_ranks

TINY = "--layers 2 --width 64 --context 32 --micro-batch 1 --sub-group-size 30000 --turns 1 --iterations 2"


def test_every_arm_is_timed_and_has_the_bits_of_stock(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, benchmarks.record, benchmarks.exposed_update as its;"
        f"benchmarks.record.RESULTS = pathlib.Path({str(tmp_path)!r});"
        f"sys.exit(its.main('{TINY} --gpu-fraction 0.5'.split()))"
    )
    (finished,) = run_ranks(1, ["-c", code], timeout_s=120)
    assert finished.returncode == 0, finished.output[-4000:]
    row = json.loads((tmp_path / "exposed_update.jsonl").read_text())
    assert list(row["arms"]) == ["stock", "no overlap", "backward", "forward", "both"]
    for name, its in row["arms"].items():
        assert its["same_bits_as_stock"], name
        assert its["exposed_update_s"]["median"] > 0, name
    assert "streamed" in row["plan"]
    assert row["iterations"] == 2
