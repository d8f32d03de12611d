"""How fast is one Adam update: by number of threads, during transfers, and on the GPU?

100 M parameters are updated. Our kernels are compared with stock's three passes, with
``torch.optim.AdamW(fused=True)`` and with the bandwidth of memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.adam import adam_bf16, adam_cpu, adam_gpu
from benchmarks.harness.charts import Bars
from benchmarks.harness.device import trains_on_gpu
from benchmarks.harness.rows import Row
from benchmarks.harness.setting import measured_profile
from benchmarks.harness.targets import MEMORY_SHARE
from deep_opt_states.host import machine
from perf_model.prediction.hardware import HardwareProfile

NUMEL = 100_000_000
THREADS = (1, 4, 16)
"""Numbers of threads to measure, in addition to one thread per core."""

NO_GPU = "no GPU"

CHART = Bars(
    "update rate",
    "update speedup over stock",
    "bandwidth",
    MEMORY_SHARE,
    "share of a copy's bandwidth",
)


def measure(*, quick: bool) -> Iterator[Row]:
    """Yield the rows of the GPU's kernel, of the CPU's kernel, and of the CPU's kernel during transfers."""
    numel, count = (1_000_000, 3) if quick else (NUMEL, 9)
    cores = machine.cores().usable
    if trains_on_gpu():
        # The GPU comes first: if the run is stopped by a time limit, the other rows may be missing.
        for grad_dtype in (torch.bfloat16, torch.float32):
            yield from adam_gpu.compare(numel, grad_dtype, count)
    else:
        yield Row(variant="GPU, ours", quantity="update rate", waived=NO_GPU)
    for threads in sorted({threads for threads in THREADS if threads < cores} | {cores}):
        yield from adam_cpu.compare(numel, threads, count)
    yield from adam_bf16.compare(numel, cores, 3 * count)
    yield from _during_transfers(quick=quick)


def _during_transfers(*, quick: bool) -> Iterator[Row]:
    """Yield the rates that the profile's probes measure, alone and during transfers in both directions."""
    with measured_profile(quick=quick) as path:
        profile = HardwareProfile.from_json(path.read_text())
    for variant, quantity in {
        "CPU, ours, alone (profile)": "cpu_adam_params_per_s",
        "CPU, ours, during transfers (profile)": "cpu_adam_beside_transfers_params_per_s",
    }.items():
        found = profile.measurements[quantity]
        unit, samples = "parameters/s", found.samples
        yield Row(variant=variant, quantity="update rate", unit=unit, samples=samples, waived=found.waived)
