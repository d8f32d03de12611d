"""How fast are copies between host and accelerator, by direction and size, pinned or pageable, and in both directions?

The hardware profile uses the same probes: they time many copies in a row on a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks.harness.rows import Row, Waived
from benchmarks.harness.setting import trains_on_gpu
from deep_opt_states.profiler.probes import Copies, Probe, bandwidth, d2h, h2d
from deep_opt_states.profiler.profile import FULL, QUICK, sample
from deep_opt_states.profiler.ranks import Ranks

SIZES = (2**16, 2**20, 2**24, 2**28)
REPETITION_BYTES = 2**30
"""The most bytes that one repetition moves."""


def measure(*, quick: bool) -> Iterator[Row]:
    """Yield the bandwidth of each kind of copy and size. Raise ``Waived`` if there is no GPU."""
    if not trains_on_gpu():
        raise Waived("no GPU: the accelerator's memory is host memory, and nothing is copied between the two")
    import torch

    from deep_opt_states.device.cuda import CudaDevice

    device = CudaDevice(torch.cuda.current_device())
    for nbytes in SIZES[:2] if quick else SIZES:
        count = max(1, min(256, REPETITION_BYTES // nbytes))
        directions: dict[str, Sequence[Callable[..., Copies]]] = {
            "host to GPU, pinned": (h2d,),
            "GPU to host, pinned": (d2h,),
            "host to GPU, pageable": (partial(h2d, pinned=False),),
            "GPU to host, pageable": (partial(d2h, pinned=False),),
            "both directions together, pinned, sum": (h2d, d2h),
        }
        for variant, make in directions.items():
            yield _row(variant, nbytes, partial(_bandwidth, device, make, nbytes, count), quick)


def _bandwidth(device: Any, make: Sequence[Callable[..., Copies]], nbytes: int, count: int) -> Probe:
    return bandwidth(device, [each(device, nbytes) for each in make], count, "bytes_per_s")


def _row(variant: str, nbytes: int, prepare: Callable[[], Probe], quick: bool) -> Row:
    rates = [rate for rates in sample(prepare, QUICK if quick else FULL, Ranks()) for rate in rates.values()]
    return Row(variant=variant, quantity="bandwidth", unit="bytes/s", samples=rates, setting={"bytes": nbytes})
