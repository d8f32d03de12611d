"""How does the gain change with more ranks?

One and two ranks are measured on this machine. 4 to 512 GPUs are *simulated*, for the paper's models on the preset of a
machine that has not been measured, with four GPUs per node, as ``plan`` predicts them.

The shard of a rank shrinks with more ranks until its states fit into the GPU: then nothing is left to interleave. If
the network is the bottleneck, the update is a smaller part of an iteration, and longer phases hide more of it.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch

from benchmarks.harness import variants
from benchmarks.harness.charts import Lines
from benchmarks.harness.interleaved_runs import run_interleaved
from benchmarks.harness.rows import REPOSITORY, Row
from benchmarks.harness.run_rows import phase_rows, rows_of_runs
from benchmarks.harness.sizes import default_setting, repetitions
from deep_opt_states.host import machine
from perf_model.prediction.hardware import HardwareProfile
from perf_model.presets.machines import MACHINES, REACHED_SHARE
from perf_model.presets.models import MODELS
from perf_model.schedule.placement import Placement
from perf_model.search.budgets import DoesNotFit
from perf_model.search.unit_sizes import UNIT_SIZES
from perf_model.training_run.forecast import Forecast, forecast
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import PUBLISHED_OVERHEADS, PhaseRates
from perf_model.training_run.predictor import MemoryLimits, Overlap, PredictedIteration

RANKS = (1, 2)
SIMULATED_RANKS = (4, 8, 16, 32, 64, 128, 256, 512)
PAPER_MODELS = ("7B", "8.3B", "10B", "13B", "20B")
MACHINE, GPUS_PER_NODE, SEQUENCE = "h100-pcie5", 4, 2048
NETWORKS_GBIT = (400, 100)
"""Network bandwidths per GPU."""

WITHOUT_INTERLEAVING = ("stock", "twin_flow", "all_cpu", "no_offload")
PAYS_OFF = 1.02
"""Smallest speedup of an iteration over the best variant without interleaving that counts as a gain."""

ROW_PREFIX = "ROW "
"""Start of the lines on which a rank prints rows."""

CHART = Lines(
    "exposed update of stock", "exposed update of ours", "exposed update of next best", x="GPUs", panel="model"
)


def measure(*, quick: bool) -> Iterator[Row]:
    """Yield the measured rows of one and two ranks, then the simulated rows of each model."""
    for ranks in RANKS:
        yield from _measured(ranks, quick=quick)
    for model in PAPER_MODELS[:1] if quick else PAPER_MODELS:
        for ranks in SIMULATED_RANKS[:2] if quick else SIMULATED_RANKS:
            yield from _simulated(model, ranks)


def _measured(ranks: int, *, quick: bool) -> Iterator[Row]:
    if machine.has_cuda() and torch.cuda.device_count() < ranks:
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


def _simulated(model: str, gpus: int) -> Iterator[Row]:
    job = Job(shape=MODELS[model], world_size=gpus, ranks_per_node=GPUS_PER_NODE, micro_batch=1, sequence=SEQUENCE)
    setting = {"machine": MACHINE, "sequence": SEQUENCE, "micro_batch": 1, "model": model, "GPUs": gpus}
    simulated_row = partial(Row, variant="SIMULATED", setting=setting)
    try:
        forecasts = {network: _forecast(job, network) for network in NETWORKS_GBIT}
    except DoesNotFit as reason:
        yield simulated_row(quantity="exposed update of ours", waived=str(reason))
        return
    found = forecasts[NETWORKS_GBIT[0]]
    fitting = _without_interleaving(found)
    if (stock := fitting.get("stock")) is not None:
        yield simulated_row(quantity="exposed update of stock", unit="s", samples=[stock.exposed_update_s])
    yield simulated_row(quantity="exposed update of ours", unit="s", samples=[found.predicted.exposed_update_s])
    next_best = min(fitting, key=lambda name: fitting[name].iteration_s)
    yield simulated_row(quantity="next best", value=next_best)
    yield simulated_row(quantity="exposed update of next best", unit="s", samples=[fitting[next_best].exposed_update_s])
    for network, forecasted in forecasts.items():
        ours_s = forecasted.predicted.iteration_s
        yield simulated_row(quantity=f"iteration at {network} Gbit/s", unit="s", samples=[ours_s])
        yield simulated_row(quantity=f"network-bound at {network} Gbit/s", value=_is_network_bound(forecasted, network))
        others = _without_interleaving(forecasted)
        if (stock := others.get("stock")) is not None:
            quantity = f"speedup over stock at {network} Gbit/s"
            yield simulated_row(quantity=quantity, unit="times", samples=[stock.iteration_s / ours_s])
        ratio = min(other.iteration_s for other in others.values()) / ours_s
        quantity = f"speedup over next best at {network} Gbit/s"
        yield simulated_row(quantity=quantity, unit="times", samples=[ratio])
        yield simulated_row(quantity=f"interleaving pays off at {network} Gbit/s", value=ratio >= PAYS_OFF)
    placements = found.planned.plan.placements
    counts = {placement: placements.count(placement) for placement in Placement}
    described = ", ".join(f"{count} {placement.value}" for placement, count in counts.items() if count)
    yield simulated_row(quantity="plan", value=described)


def _profile(network_gbit: int) -> HardwareProfile:
    """Return the profile of the machine with a network of so many gigabits per second and GPU."""
    return replace(MACHINES[MACHINE], network_bytes_per_s=REACHED_SHARE * network_gbit * 1e9 / 8).profile(GPUS_PER_NODE)


def _forecast(job: Job, network_gbit: int) -> Forecast:
    profile = _profile(network_gbit)
    limits = MemoryLimits(gpu=profile.gpu_memory_bytes, host=profile.host_memory_bytes)
    return forecast(job, profile, limits, Overlap(), UNIT_SIZES, PUBLISHED_OVERHEADS)


def _without_interleaving(found: Forecast) -> dict[str, PredictedIteration]:
    """Return the variants that interleave nothing, as far as they fit."""
    candidates = {name: found.baselines[name] for name in WITHOUT_INTERLEAVING}
    return {name: outcome for name, outcome in candidates.items() if isinstance(outcome, PredictedIteration)}


def _is_network_bound(found: Forecast, network_gbit: int) -> bool:
    """Return whether the phases take longer than with a network that takes no time."""
    rates = PhaseRates.from_profile(_profile(network_gbit), GPUS_PER_NODE, PUBLISHED_OVERHEADS)
    free = replace(rates, network=replace(rates.network, inter_node_bytes_per_s=math.inf))
    work = found.job.work
    return work.forward_s(rates) + work.backward_s(rates) > work.forward_s(free) + work.backward_s(free)


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
