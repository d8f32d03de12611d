"""Run each job in processes of its own, with a time limit, whatever happens to the jobs before it."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.arms import ArmJob
from benchmarks.harness.cores import usable_cores
from tests.gpu.parts import BUILD
from tests.gpu.run_parts import remove_compiler_locks
from tests.launch import environment, free_port, run_ranks, run_together

LIMIT_S = 180.0
"""The limit of a job. With 4 billion parameters, the first job of ours took 72 s until its first step."""

FEWEST_S = 80.0
"""A job does not start if less time is left: the first step of a large model comes after 54 to 72 s."""

MOST_OF_LOG = 3_000
"""Characters that are shown of the output of a job that failed."""

FUSED_ADAM = "from deepspeed.ops.op_builder import FusedAdamBuilder; FusedAdamBuilder().load()"


@dataclass(frozen=True, kw_only=True)
class ArmOutcome:
    """The records of a job by rank, and the error that stopped it, if any; or the reason why it did not run."""

    job: ArmJob
    records: Sequence[Sequence[dict[str, Any]]] = ()
    error: str = ""
    waived: str = ""

    def __str__(self) -> str:
        tokens = ", ".join(f"{tokens:,}" for tokens in self.job.tokens)
        name = f"{self.job.arm}{' (bits)' if self.job.deterministic else ''}, {tokens} tokens"
        if self.waived:
            return f"{name}: WAIVED: {self.waived}"
        seconds = ", ".join(f"{record['mean_s']:.3f} s" for record in self.records[0])
        return f"{name}: {seconds or 'no record'}{f'; FAILED: {self.error}' if self.error else ''}"


def compile_kernels() -> None:
    """Compile all kernels of DeepSpeed and of the plugin side by side. A job compiles the missing ones afterwards."""
    variables = environment(DS_ACCELERATOR=os.environ["DS_ACCELERATOR"])
    commands = [list(BUILD.command), [sys.executable, "-c", FUSED_ADAM]]
    for finished in run_together(commands, free_port(), BUILD.limit_s, [variables] * len(commands)):
        if finished.returncode != 0:
            print(finished.output[-MOST_OF_LOG:], flush=True)
    remove_locks()


def remove_locks() -> None:
    """Remove the locks of killed compilations, for which the next job would wait for ever."""
    if folder := os.environ.get("TORCH_EXTENSIONS_DIR"):
        remove_compiler_locks(Path(folder))


def run_jobs(
    jobs: Iterable[ArmJob], ends_s: float, limit_s: float = LIMIT_S, program: str = "benchmarks.gpu.train"
) -> Iterator[ArmOutcome]:
    """Run the jobs one after the other until ``time.monotonic()`` is ``ends_s``. Yield each outcome immediately."""
    for job in jobs:
        left_s = ends_s - time.monotonic()
        if (reason := job.waived_reason()) is not None:
            yield ArmOutcome(job=job, waived=reason)
        elif left_s < min(FEWEST_S, limit_s):
            yield ArmOutcome(job=job, waived="no time was left")
        else:
            yield _run(job, min(limit_s, left_s), program)


def _run(job: ArmJob, limit_s: float, program: str) -> ArmOutcome:
    variables: dict[str, Any] = {
        "DS_ACCELERATOR": os.environ["DS_ACCELERATOR"],
        "OMP_NUM_THREADS": str(max(1, usable_cores() // job.ranks)),
    }
    start_s = time.monotonic()
    ranks = run_ranks(job.ranks, ["-m", program, json.dumps(asdict(job))], limit_s, **variables)
    failed = [rank for rank in ranks if rank.returncode != 0]
    error = ""
    if failed:
        print(failed[0].output[-MOST_OF_LOG:], flush=True)
        remove_locks()
        timed_out = time.monotonic() - start_s >= limit_s
        error = f"did not end within {limit_s:.0f} s" if timed_out else _error_of(failed[0].output)
    return ArmOutcome(job=job, records=[rank.answers() for rank in ranks], error=error)


def _error_of(output: str) -> str:
    """Return the last exception of the output in one line, or its last line."""
    lines = output.strip().splitlines() or ["ended without a word"]
    exceptions = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return (exceptions or lines)[-1][:200]
