"""Are losses and states bit-identical to stock's with deterministic algorithms, with one rank and with two on one GPU?

Stock and ours train a random Qwen3 (``benchmarks/gpu/``). Two ranks use Gloo with tensors of the GPU, since NCCL
refuses two ranks on one GPU, and train a smaller model, since Gloo copies through host memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.gpu import TOKENS, chosen_model, rows_of
from benchmarks.gpu.arms import bits_jobs
from benchmarks.gpu.processes import run_jobs
from benchmarks.harness.rows import Row

BITS_TOKENS = 4_096
MODEL_OF_TWO_RANKS = "Qwen3-0.6B"


def measure(*, quick: bool, billions: float = 1.7, minutes: float = 8.6) -> Iterator[Row]:
    """Yield whether the bits are the same, within so many minutes. Raise ``Waived`` if there is no GPU."""
    ends_s = time.monotonic() + 60 * minutes
    model, tokens = chosen_model(billions, quick=quick), TOKENS["tiny"][0] if quick else BITS_TOKENS
    jobs = [*bits_jobs(model, tokens, 1), *bits_jobs(model if quick else MODEL_OF_TWO_RANKS, tokens, 2)]
    yield from rows_of(run_jobs(jobs, ends_s))
