"""How fast are copies between host and accelerator, by direction and size, pinned or pageable, and in both directions?

The probes are those of the hardware profile: they verify the copied bytes, and time many copies in a row on a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.harness.charts import Lines
from benchmarks.harness.device import trains_on_gpu
from benchmarks.harness.rows import Row, Waived
from deep_opt_states.profiler import transfers
from deep_opt_states.profiler.method import FULL, QUICK, Probe, sample
from deep_opt_states.profiler.ranks import OneRank

SIZES = (2**16, 2**20, 2**24, 2**28)
REPETITION_BYTES = 2**30
"""The most bytes that one repetition moves."""

CHART = Lines("bandwidth", x="bytes")


def measure(*, quick: bool) -> Iterator[Row]:
    """Yield the bandwidth of each kind of copy and size. Raise ``Waived`` if there is no GPU."""
    if not trains_on_gpu():
        raise Waived("no GPU: the accelerator's memory is host memory, and nothing is copied between the two")
    import torch

    from deep_opt_states.device.cuda import CudaDevice

    device = CudaDevice(torch.cuda.current_device())
    for nbytes in SIZES[:2] if quick else SIZES:
        count = max(1, min(256, REPETITION_BYTES // nbytes))
        for variant, make in {
            "host to GPU, pinned": transfers.pinned_h2d,
            "GPU to host, pinned": transfers.pinned_d2h,
            "host to GPU, pageable": transfers.pageable_h2d,
            "GPU to host, pageable": transfers.pageable_d2h,
        }.items():
            yield _row(variant, nbytes, partial(_one_way, device, make, nbytes, count), quick)
        both = partial(_both_ways, device, nbytes, count)
        yield _row("both directions at once, pinned, sum", nbytes, both, quick)


def _one_way(device: Any, make: Callable[..., transfers.Copies], nbytes: int, count: int) -> Probe:
    return transfers.OneWay(device, make(device, nbytes), count, "bytes_per_s")


def _both_ways(device: Any, nbytes: int, count: int) -> Probe:
    return transfers.BothWays(device, *transfers.pinned_both(device, nbytes), count)


def _row(variant: str, nbytes: int, prepare: Callable[[], Probe], quick: bool) -> Row:
    rates = [rate for rates in sample(prepare, QUICK if quick else FULL, OneRank()) for rate in rates.values()]
    return Row(variant=variant, quantity="bandwidth", unit="bytes/s", samples=rates, setting={"bytes": nbytes})
