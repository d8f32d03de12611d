"""What becomes of it with more ranks?

One and two ranks are measured on this machine. 4 to 512 GPUs are *simulated*, for the paper's models on a preset of a
machine that nobody measured, four GPUs a node. A rank's shard shrinks until its states fit the GPU: then nothing is
left to interleave. And where the network binds, the update is a smaller part of an iteration. ZeRO-3 gathers the
16-bit parameters in forward and in backward and scatters as many gradients; each node receives them once, by the
network of all its GPUs, and arithmetic hides that as far as it lasts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch

from benchmarks.harness import arms
from benchmarks.harness.picture import Lines
from benchmarks.harness.rows import REPOSITORY, Row
from benchmarks.harness.sizes import effort, usual
from benchmarks.harness.turn_rows import phases, rows_of
from benchmarks.harness.turns import take_turns
from deep_opt_states.host import machine
from deep_opt_states.zero.start.devices import SHARE_OF_GPU_MEMORY
from perf_model.cli.inputs import OVERLAPS
from perf_model.presets.machines import MACHINES, REACHED
from perf_model.presets.models import MODELS
from perf_model.schedule.placement import Placement
from perf_model.search.budgets import DoesNotFit
from perf_model.search.planner import SUB_GROUP_SIZES
from perf_model.training_run.forecast import Iteration, MemoryLimits, forecast
from perf_model.training_run.job import PARAM_BYTES, Job

RANKS = (1, 2)
SIMULATED_RANKS = (4, 8, 16, 32, 64, 128, 256, 512)
PAPER_MODELS = ("7B", "8.3B", "10B", "13B", "20B")
MACHINE, GPUS_PER_NODE, SEQUENCE = "h100-pcie5", 4, 2048
NETWORKS_GBIT = (400, 100)
"""A GPU."""

WITHOUT_INTERLEAVING = ("stock", "twin_flow", "all_cpu", "no_offload")
PAYS = 1.02
"""Iterations so many times faster than the best of those."""

ANSWER = "ROW "

PICTURE = Lines("update exposed, stock", "update exposed, ours", "update exposed, next best", x="GPUs", panel="model")


def measure(*, quick: bool) -> Iterator[Row]:
    for ranks in RANKS:
        yield from _measured(ranks, quick=quick)
    for model in PAPER_MODELS[:1] if quick else PAPER_MODELS:
        for ranks in SIMULATED_RANKS[:2] if quick else SIMULATED_RANKS:
            yield from _simulated(model, ranks)


def _measured(ranks: int, *, quick: bool) -> Iterator[Row]:
    if machine.has_cuda() and torch.cuda.device_count() < ranks:
        setting = {**asdict(usual(quick=quick)), "ranks": ranks}
        yield Row(arm="ours", quantity="iteration", waived=f"fewer than {ranks} GPUs", setting=setting)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "benchmarks.scaling", *(["--quick"] if quick else [])]
    # PyTorch's launcher would give each rank a single thread.
    env = os.environ | {"OMP_NUM_THREADS": str(max(1, machine.cores().usable // ranks))}
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, env=env)
    for line in finished.stdout.splitlines():
        if line.startswith(ANSWER):
            yield Row(**json.loads(line.removeprefix(ANSWER)))


def _simulated(model: str, gpus: int) -> Iterator[Row]:
    job = Job(shape=MODELS[model], world_size=gpus, ranks_per_node=GPUS_PER_NODE, micro_batch=1, sequence=SEQUENCE)
    profile = MACHINES[MACHINE].profile(GPUS_PER_NODE)
    assert profile.gpu_memory_bytes is not None
    # What the plugin takes where the config does not say, beside what the model takes.
    gpu_bytes = min(profile.gpu_memory_bytes, job.gpu_bytes + int(SHARE_OF_GPU_MEMORY * profile.gpu_memory_bytes))
    limits = MemoryLimits(gpu=gpu_bytes, host=profile.host_memory_bytes)
    about = {"machine": MACHINE, "sequence": SEQUENCE, "micro_batch": 1, "model": model, "GPUs": gpus}
    of = partial(Row, arm="SIMULATED", setting=about)
    try:
        found = forecast(job, profile, limits, OVERLAPS["both"], SUB_GROUP_SIZES)
    except DoesNotFit as why:
        yield of(quantity="update exposed, ours", waived=str(why))
        return
    # No memory of the GPU is kept from what does not offload.
    whole = MemoryLimits(gpu=profile.gpu_memory_bytes, host=profile.host_memory_bytes)
    others = {
        **found.baselines,
        "no_offload": forecast(job, profile, whole, OVERLAPS["both"], SUB_GROUP_SIZES).baselines["no_offload"],
    }
    fitting = {name: others[name] for name in WITHOUT_INTERLEAVING}
    running = {name: its for name, its in fitting.items() if isinstance(its, Iteration)}
    ours = found.predicted
    if (stock := running.get("stock")) is not None:
        yield of(quantity="update exposed, stock", unit="s", samples=[stock.exposed_update_s])
    yield of(quantity="update exposed, ours", unit="s", samples=[ours.exposed_update_s])
    next_best = min(running, key=lambda name: running[name].iteration_s)
    yield of(quantity="next best", said=next_best)
    yield of(quantity="update exposed, next best", unit="s", samples=[running[next_best].exposed_update_s])
    for network in NETWORKS_GBIT:
        gather_s = _gather_s(job, network)
        ours_s = _iteration_s(ours, gather_s)
        at = f"{network} Gbit/s"
        yield of(quantity=f"iteration, {at}", unit="s", samples=[ours_s])
        yield of(quantity=f"network binds, {at}", said=gather_s * 3 > ours.forward_s + ours.backward_s)
        if stock is not None:
            ratio = _iteration_s(stock, gather_s) / ours_s
            yield of(quantity=f"faster than stock, {at}", unit="times", samples=[ratio])
        ratio = _iteration_s(running[next_best], gather_s) / ours_s
        yield of(quantity=f"faster than next best, {at}", unit="times", samples=[ratio])
        yield of(quantity=f"interleaving pays, {at}", said=ratio >= PAYS)
    counts = {its: found.planned.plan.placements.count(its) for its in Placement}
    yield of(quantity="plan", said=", ".join(f"{count} {its.value}" for its, count in counts.items() if count))


def _gather_s(job: Job, network_gbit: int) -> float:
    """Of all parameters, by every node from the others."""
    nodes = -(-job.world_size // GPUS_PER_NODE)
    node_bytes_per_s = REACHED * job.ranks_of_a_node * network_gbit * 1e9 / 8
    return PARAM_BYTES * job.shape.numel * (nodes - 1) / nodes / node_bytes_per_s


def _iteration_s(its: Iteration, gather_s: float) -> float:
    """What of the update was predicted to be exposed stays so, though a window that waits for the network is longer."""
    return max(its.forward_s, gather_s) + max(its.backward_s, 2 * gather_s) + its.exposed_update_s


def work(arguments: Sequence[str]) -> None:
    """One rank of those that ``_measured`` starts; rank 0 prints the rows."""
    import deepspeed
    import torch.distributed as dist

    deepspeed.init_distributed()
    quick = "--quick" in arguments
    setting = usual(quick=quick)
    ran = take_turns((arms.STOCK, arms.OURS_AS_IT_IS), setting, effort(quick=quick))
    for row in rows_of(ran, phases):
        with_ranks = replace(row, setting={**row.setting, "ranks": dist.get_world_size()})
        if dist.get_rank() == 0:
            print(f"\n{ANSWER}{json.dumps(asdict(with_ranks))}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    work(sys.argv[1:])
