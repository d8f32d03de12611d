"""How does the gain change with more ranks?

One and two ranks are measured on this machine. ``simulated_scaling`` predicts clusters.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import torch

from benchmarks.harness import variants
from benchmarks.harness.charts import Bars
from benchmarks.harness.device import trains_on_gpu
from benchmarks.harness.interleaved_runs import run_interleaved
from benchmarks.harness.rows import REPOSITORY, Row
from benchmarks.harness.run_rows import phase_rows, rows_of_runs
from benchmarks.harness.sizes import default_setting, repetitions
from deep_opt_states.host import machine

RANKS = (1, 2)

ROW_PREFIX = "ROW "
"""Start of the lines on which a rank prints rows."""

CHART = Bars("iteration", "update exposed")


def measure(*, quick: bool) -> Iterator[Row]:
    """Yield the rows of each number of ranks."""
    for ranks in RANKS:
        yield from _measured(ranks, quick=quick)


def _measured(ranks: int, *, quick: bool) -> Iterator[Row]:
    if trains_on_gpu() and torch.cuda.device_count() < ranks:
        setting = {**asdict(default_setting(quick=quick)), "ranks": ranks}
        yield Row(variant="ours", quantity="iteration", waived=f"fewer than {ranks} GPUs", setting=setting)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "benchmarks.scaling", *(["--quick"] if quick else [])]
    # Without this variable, PyTorch's launcher gives each rank a single thread.
    env = os.environ | {"OMP_NUM_THREADS": str(max(1, machine.cores().usable // ranks))}
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, env=env)
    for line in finished.stdout.splitlines():
        if line.startswith(ROW_PREFIX):
            yield Row(**json.loads(line.removeprefix(ROW_PREFIX)))


def run_rank(arguments: Sequence[str]) -> None:
    """Run one of the ranks that ``_measured`` starts. Rank 0 prints the rows."""
    import deepspeed
    import torch.distributed as dist

    deepspeed.init_distributed()
    quick = "--quick" in arguments
    setting = default_setting(quick=quick)
    runs = run_interleaved((variants.STOCK, variants.OURS_DEFAULT), setting, repetitions(quick=quick))
    for row in rows_of_runs(runs, phase_rows):
        with_ranks = replace(row, setting={**row.setting, "ranks": dist.get_world_size()})
        if dist.get_rank() == 0:
            print(f"\n{ROW_PREFIX}{json.dumps(asdict(with_ranks))}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_rank(sys.argv[1:])
