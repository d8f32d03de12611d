"""Measure a small copy beside the lanes on an EMULATED machine, with copies divided into chunks and with whole copies.

The emulated copy engine takes copies in the order in which they become ready. That of a GPU may prefer copies of the
stream that it serves already (``deep_opt_states/device/cuda.py``). ``make gpu-check`` measures the same on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.emulated.run import EmulatedRun
from benchmarks.harness.rows import Row
from benchmarks.harness.small_copies import DIRECTIONS, SMALL_BYTES, SmallCopies
from deep_opt_states.device.cuda import CHUNK_BYTES, CudaDevice
from perf_model.schedule.workload import FP32_BYTES

CHUNKS, WHOLE = "copies in chunks", "whole copies"

LATENCY = "EMULATED latency of a 1 KB copy beside the lanes"
COST = "EMULATED bandwidth that chunks cost"


def small_copy_rows(run: EmulatedRun, *, quick: bool) -> Iterator[Row]:
    """Yield the seconds of small copies in the two cases, and the bandwidth that dividing the copies costs.

    Call this while ``run`` is emulated. The lanes copy states of the small model's sub-groups. Chunks and small copies
    are smaller by the scale of the run, too. One element, which is the smallest copy, stands for 1.8 KB or more.
    """
    small_bytes = FP32_BYTES * max(1, round(SMALL_BYTES / run.scale / FP32_BYTES))
    large_bytes = FP32_BYTES * run.small.sub_group_size
    probes = {
        variant: SmallCopies(CudaDevice(0, chunk_bytes), large_bytes, small_bytes)
        for variant, chunk_bytes in {CHUNKS: round(CHUNK_BYTES / run.scale), WHOLE: sys.maxsize}.items()
    }
    count = 5 if quick else 20
    for direction in DIRECTIONS:
        for variant, probe in probes.items():
            labels: dict[str, Any] = {"variant": variant, "setting": run.labels, "unit": "s"}
            yield Row(quantity=f"{LATENCY}, {direction}", samples=probe.beside_lanes_s(direction, count), **labels)
            alone_s = probe.alone_s(direction, count)
            yield Row(quantity=f"EMULATED latency of a 1 KB copy alone, {direction}", samples=alone_s, **labels)
        chunks, whole = (probes[variant].lane_bytes_per_s(direction) for variant in (CHUNKS, WHOLE))
        labels = {"variant": CHUNKS, "setting": run.labels, "unit": "share"}
        yield Row(quantity=f"{COST}, {direction}", samples=[1 - chunks / whole], **labels)
