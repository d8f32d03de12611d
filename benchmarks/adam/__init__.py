"""How fast is one Adam update: by number of threads and dtype of the states, and on the GPU?

100 M parameters are updated. Our kernels are compared with stock's three passes, with
``torch.optim.AdamW(fused=True)`` and with the bandwidth of memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.adam import adam_cpu, adam_gpu
from benchmarks.harness.cores import usable_cores
from benchmarks.harness.rows import Row
from benchmarks.harness.setting import trains_on_gpu

NUMEL = 100_000_000
THREADS = (1, 4, 16)
"""Numbers of threads to measure, in addition to one thread per core."""


def measure(*, quick: bool) -> Iterator[Row]:
    """Yield the rows of the GPU's kernel, if there is a GPU, and of the CPU's kernel."""
    numel, count = (1_000_000, 3) if quick else (NUMEL, 9)
    cores = usable_cores()
    if trains_on_gpu():
        # The GPU comes first: if the run is stopped by a time limit, the other rows may be missing.
        for grad_dtype in (torch.bfloat16, torch.float32):
            yield from adam_gpu.compare(numel, grad_dtype, count)
    for threads in sorted({threads for threads in THREADS if threads < cores} | {cores}):
        yield from adam_cpu.compare(numel, threads, count)
