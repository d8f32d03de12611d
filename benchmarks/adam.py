"""How fast is one Adam update: by number of threads, beside transfers, and on the GPU?

Against stock's three passes, ``torch.optim.AdamW(fused=True)`` and the limit of memory, on 100 M parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import cpu_adam, gpu_adam
from benchmarks.harness.machine_profile import measured_profile
from benchmarks.harness.picture import Bars
from benchmarks.harness.rows import Row
from deep_opt_states.host import machine
from perf_model.prediction.hardware import HardwareProfile

NUMEL = 100_000_000
THREADS = (1, 4, 16)
"""And as many as there are cores."""

NO_GPU = "no GPU"

PICTURE = Bars(
    "update rate",
    "updates faster than stock",
    "bandwidth",
    "of the bandwidth in place",
    "of a copy's bandwidth",
)


def measure(*, quick: bool) -> Iterator[Row]:
    numel, repetitions = (1_000_000, 3) if quick else (NUMEL, 9)
    cores = machine.cores().usable
    if torch.cuda.is_available():
        # First: where time is bounded, the rest may be missing.
        for grad_dtype in (torch.bfloat16, torch.float32):
            yield from gpu_adam.compare(numel, grad_dtype, repetitions)
    else:
        yield Row(arm="GPU, ours", quantity="update rate", waived=NO_GPU)
    for threads in sorted({its for its in THREADS if its < cores} | {cores}):
        yield from cpu_adam.compare(numel, threads, repetitions)
    yield from _beside_transfers()


def _beside_transfers() -> Iterator[Row]:
    """The profile's probe."""
    with measured_profile(quick=True) as path:
        profile = HardwareProfile.from_json(path.read_text())
    for arm, quantity in {
        "CPU, ours, alone, by the profile": "cpu_adam_params_per_s",
        "CPU, ours, beside transfers both ways": "cpu_adam_beside_transfers_params_per_s",
    }.items():
        found = profile.measurements[quantity]
        unit, samples = "parameters/s", found.samples
        yield Row(arm=arm, quantity="update rate", unit=unit, samples=samples, waived=found.waived)
