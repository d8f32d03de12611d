"""A gradient crosses PCIe once, or not at all: counted on the recording accelerator, which has a memory of its own."""

from __future__ import annotations

import json

from tests.launch import run_ranks

CPU, STREAMED = {"placement": "cpu"}, {"placement": "streamed"}
MIXED = {"placement": "stride", "update_stride": 2}


def test_bytes_by_direction() -> None:
    cases = [(block, accumulation) for accumulation in (1, 3) for block in (CPU, STREAMED, MIXED)]
    (finished,) = run_ranks(1, ["-m", "tests.zero.scripts.gradient_traffic", json.dumps(cases)], timeout_s=200)
    assert finished.returncode == 0, finished.output[-4000:]
    for (block, accumulation), found in zip(cases, finished.answers(), strict=True):
        what = f"{block}, {accumulation} micro-batches"
        once = found["steps"] * found["element_bytes"] * found["numel"]["cpu"]
        if block == CPU and accumulation > 1:
            # Nothing is on the accelerator, so the sums are in host memory, as stock's.
            assert (found["d2h_bytes"], found["h2d_bytes"]) == (accumulation * once, (accumulation - 1) * once), what
        else:
            assert (found["d2h_bytes"], found["h2d_bytes"], found["h2d_copies"]) == (once, 0, 0), what
        if block == STREAMED:
            assert found["d2h_copies"] == 0, what
        else:
            assert 0 < found["d2h_copies"] < found["parameters"] * found["steps"] * accumulation, "few large ones"
