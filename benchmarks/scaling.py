"""What becomes of it with more ranks?

One and two ranks are measured on this machine. 4 to 512 GPUs are *simulated*, for the paper's models on presets of
machines that nobody measured, four GPUs a node: a rank's shard shrinks until there is little left to interleave, and
communication between nodes, which the model takes to be hidden, would bind first. The plan says what it chooses then.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial

from benchmarks import arms
from benchmarks.rows import REPOSITORY, Row
from benchmarks.sizes import usual
from benchmarks.turn_rows import all_of
from benchmarks.turns import take_turns
from deep_opt_states.zero.devices import SHARE_OF_GPU_MEMORY
from perf_model.budgets import DoesNotFit
from perf_model.cli.inputs import OVERLAPS
from perf_model.forecast import MemoryLimits, Unfit, forecast
from perf_model.job import Job
from perf_model.placement import Placement
from perf_model.presets.machines import MACHINES
from perf_model.presets.models import MODELS
from perf_model.sub_group_size import SUB_GROUP_SIZES

RANKS = (1, 2)
SIMULATED_RANKS = (4, 8, 16, 32, 64, 128, 256, 512)
PAPER_MODELS = ("7B", "8.3B", "10B", "13B", "20B")
MACHINE, GPUS_PER_NODE, SEQUENCE = "h100-pcie5", 4, 2048
ANSWER = "TURNS "


def measure(*, quick: bool) -> Iterator[Row]:
    for ranks in RANKS:
        yield from _measured(ranks, quick=quick)
    for model in PAPER_MODELS[:1] if quick else PAPER_MODELS:
        for ranks in SIMULATED_RANKS[:2] if quick else SIMULATED_RANKS:
            yield from _simulated(model, ranks)


def _measured(ranks: int, *, quick: bool) -> Iterator[Row]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "benchmarks.scaling", *(["--quick"] if quick else [])]
    finished = subprocess.run(command, check=True, capture_output=True, text=True, cwd=REPOSITORY)
    (line,) = (its for its in finished.stdout.splitlines() if its.startswith(ANSWER))
    about = {**asdict(usual(quick=quick)), "ranks": ranks, "simulated": False}
    for arm, found in json.loads(line.removeprefix(ANSWER)).items():
        of = partial(Row, arm=f"{arm}, {ranks} rank{'s' if ranks > 1 else ''}", setting=about)
        yield of(quantity="iteration", unit="s", samples=found["iteration_s"])
        yield of(quantity="update", unit="s", samples=found["step_s"])
        yield of(quantity="stock's bits", said=found["same"], claimed=True)


def _simulated(model: str, ranks: int) -> Iterator[Row]:
    job = Job(shape=MODELS[model], world_size=ranks, ranks_per_node=GPUS_PER_NODE, micro_batch=1, sequence=SEQUENCE)
    profile = MACHINES[MACHINE].profile(GPUS_PER_NODE)
    assert profile.gpu_memory_bytes is not None
    # What the plugin takes where the config does not say, beside what the model takes.
    gpu_bytes = min(profile.gpu_memory_bytes, job.gpu_bytes + int(SHARE_OF_GPU_MEMORY * profile.gpu_memory_bytes))
    limits = MemoryLimits(gpu=gpu_bytes, host=profile.host_memory_bytes)
    about = {"model": model, "ranks": ranks, "machine": MACHINE, "simulated": True}
    of = partial(Row, arm=f"{model}, {ranks} GPUs, SIMULATED", setting=about)
    try:
        found = forecast(job, profile, limits, OVERLAPS["both"], SUB_GROUP_SIZES)
    except DoesNotFit as why:
        yield of(quantity="update exposed", waived=str(why))
        return
    planned = found.planned
    counts = [f"{planned.plan.placements.count(its)} {its.value}" for its in Placement]
    yield of(quantity="plan", said=", ".join(counts))
    yield of(quantity="update exposed", unit="s", samples=[planned.exposed_s])
    yield of(quantity="update", unit="s", samples=[planned.update_s])
    for name, arm in found.baselines.items():
        if isinstance(arm, Unfit):
            yield of(quantity=f"update exposed, {name}", waived=arm.why)
        else:
            yield of(quantity=f"update exposed, {name}", unit="s", samples=[arm.exposed_update_s])


def work(arguments: Sequence[str]) -> None:
    """One rank of those that ``_measured`` starts; rank 0 prints the answer."""
    import deepspeed
    import torch.distributed as dist

    deepspeed.init_distributed()
    quick = "--quick" in arguments
    compared = (arms.STOCK, arms.OURS_AS_IT_IS)
    iterations, rounds = (2, 1) if quick else (5, 3)
    turns = take_turns(compared, usual(quick=quick), iterations=iterations, rounds=rounds)
    stock = turns[arms.STOCK.name][0]
    found = {
        name: {
            "iteration_s": all_of(its_turns, "iteration_s"),
            "step_s": all_of(its_turns, "step_s"),
            "same": all(turn.same_bits_as(stock) for turn in its_turns),
        }
        for name, its_turns in turns.items()
    }
    if dist.get_rank() == 0:
        print(ANSWER + json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    work(sys.argv[1:])
