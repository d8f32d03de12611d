"""How would the gain change on clusters of up to 512 GPUs? (SIMULATED)

4 to 512 GPUs are *simulated*, for the paper's models on the preset of a machine that has not been measured, with four
GPUs per node, as ``plan`` predicts them.

The shard of a rank shrinks with more ranks until its states fit into the GPU: then nothing is left to interleave. If
the network is the bottleneck, the update is a smaller part of an iteration, and longer phases hide more of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from benchmarks.harness.charts import Lines
from benchmarks.harness.rows import SIMULATED, Row
from perf_model.planner import UNIT_SIZES
from perf_model.prediction.hardware import HardwareProfile
from perf_model.prediction.memory import DoesNotFit
from perf_model.presets.machines import MACHINES
from perf_model.presets.models import MODELS
from perf_model.schedule.placement import Placement
from perf_model.training_run.forecast import Forecast, MemoryLimits, Overlap, PredictedIteration
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import Overheads, PhaseRates

SIMULATED_RANKS = (4, 8, 16, 32, 64, 128, 256, 512)
PAPER_MODELS = ("7B", "8.3B", "10B", "13B", "20B")
MACHINE, GPUS_PER_NODE, SEQUENCE = "h100-pcie5", 4, 2048
NETWORKS_GBIT = (400, 100)
"""Network bandwidths per GPU."""

WITHOUT_INTERLEAVING = ("stock", "twin_flow", "all_cpu", "no_offload")
PAYS_OFF = 1.02
"""Smallest speedup of an iteration over the best variant without interleaving that counts as a gain."""

FASTEST = f"at {NETWORKS_GBIT[0]} Gbit/s"
"""The network of the rows about the plan, which are not repeated for each network."""

CHART = Lines(
    *(f"exposed update of {variant} {FASTEST}" for variant in ("stock", "ours", "next best")), x="GPUs", panel="model"
)


def measure(*, quick: bool) -> Iterator[Row]:
    """Yield the rows of each model and number of GPUs."""
    for model in PAPER_MODELS[:1] if quick else PAPER_MODELS:
        for ranks in SIMULATED_RANKS[:2] if quick else SIMULATED_RANKS:
            yield from _simulated(model, ranks)


def _simulated(model: str, gpus: int) -> Iterator[Row]:
    job = Job(shape=MODELS[model], world_size=gpus, ranks_per_node=GPUS_PER_NODE, micro_batch=1, sequence=SEQUENCE)
    setting = {"machine": MACHINE, "sequence": SEQUENCE, "micro_batch": 1, "model": model, "GPUs": gpus}
    simulated_row = partial(Row, variant=SIMULATED, setting=setting)
    try:
        forecasts = {network: _forecast(job, network) for network in NETWORKS_GBIT}
    except DoesNotFit as reason:
        yield simulated_row(quantity=f"exposed update of ours {FASTEST}", waived=str(reason))
        return
    found = forecasts[NETWORKS_GBIT[0]]
    fitting = _without_interleaving(found)
    if (stock := fitting.get("stock")) is not None:
        yield simulated_row(quantity=f"exposed update of stock {FASTEST}", unit="s", samples=[stock.exposed_update_s])
    exposed_s = found.predicted.exposed_update_s
    yield simulated_row(quantity=f"exposed update of ours {FASTEST}", unit="s", samples=[exposed_s])
    next_best = min(fitting, key=lambda name: fitting[name].iteration_s)
    yield simulated_row(quantity=f"next best {FASTEST}", value=next_best)
    exposed_s = fitting[next_best].exposed_update_s
    yield simulated_row(quantity=f"exposed update of next best {FASTEST}", unit="s", samples=[exposed_s])
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
    yield simulated_row(quantity=f"plan {FASTEST}", value=described)


def _profile(network_gbit: int) -> HardwareProfile:
    """Return the profile of the machine with a network of so many gigabits per second and GPU."""
    return replace(MACHINES[MACHINE], network_bytes_per_s=network_gbit * 1e9 / 8).profile(GPUS_PER_NODE)


def _forecast(job: Job, network_gbit: int) -> Forecast:
    profile = _profile(network_gbit)
    limits = MemoryLimits(gpu=profile.gpu_memory_bytes, host=profile.host_memory_bytes)
    return Forecast(job, profile, limits, Overlap(), UNIT_SIZES, Overheads.from_profile(profile))


def _without_interleaving(found: Forecast) -> dict[str, PredictedIteration]:
    """Return the variants that interleave nothing, as far as they fit."""
    candidates = {name: found.baselines[name] for name in WITHOUT_INTERLEAVING}
    return {name: outcome for name, outcome in candidates.items() if isinstance(outcome, PredictedIteration)}


def _is_network_bound(found: Forecast, network_gbit: int) -> bool:
    """Return whether the phases take longer than with a network that takes no time."""
    profile = _profile(network_gbit)
    rates = PhaseRates.from_profile(profile, GPUS_PER_NODE, Overheads.from_profile(profile).of_plugin)
    free = replace(rates, network=replace(rates.network, inter_node_bytes_per_s=math.inf))
    work = found.job.work
    return work.forward_s(rates) + work.backward_s(rates) > work.forward_s(free) + work.backward_s(free)
