"""Find the changes that make a training run fit, if no plan does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from perf_model.prediction.hardware import HardwareProfile
from perf_model.training_run.job import Job
from perf_model.training_run.predictor import MAX_RANKS, MemoryLimits, Predictor

LIMITS_TO_LIFT = {
    "gpu_bytes": "GPU memory: raise --gpu-memory-gb, or lower --gpu-memory-margin-gb.",
    "host_bytes": "Host memory, which includes the system and the processes: raise --host-memory-gb.",
    "pinned_bytes": "Pinned memory: raise --pinned-memory-gb.",
}
"""The options that raise each budget."""


def limits_to_lift(missing: Iterable[str]) -> str:
    """Return which options raise the budgets ``missing``."""
    return " ".join(LIMITS_TO_LIFT[name] for name in missing)


def find_remedy(job: Job, profile: HardwareProfile, limits: MemoryLimits) -> str:
    """Return the remedy if no plan fits."""
    remedies = []
    ranks = least_world_size_that_fits(job, profile, limits)
    if ranks is not None:
        nodes = -(-ranks // job.ranks_per_node)
        remedies.append(f"{ranks} ranks" if nodes == 1 else f"{ranks} ranks on {nodes} nodes")
    offloaded = replace(job, offload_param=True)
    may_offload = profile.has_accelerator and not job.offload_param
    if may_offload and Predictor(offloaded, profile, limits).fits:
        remedies.append("--offload-param")
    for option in ("micro_batch", "sequence"):
        size = _largest_size_that_fits(option, job, profile, limits)
        if size is not None:
            remedies.append(f"--{option.replace('_', '-')} {size}")
    if not job.recompute and Predictor(replace(job, recompute=True), profile, limits).fits:
        remedies.append("recomputation: leave out --no-recompute")
    if remedies:
        return f"It fits with {', or with '.join(remedies)}."
    most = replace(job, world_size=max(_more_ranks(job), default=job.world_size))
    return Predictor(most, profile, limits).why_never()


def least_world_size_that_fits(job: Job, profile: HardwareProfile, limits: MemoryLimits) -> int | None:
    """Return the first of twice, four times ... the ranks of ``job`` with which a plan fits, or None."""
    for ranks in _more_ranks(job):
        if Predictor(replace(job, world_size=ranks), profile, limits).fits:
            return ranks
    return None


def _largest_size_that_fits(option: str, job: Job, profile: HardwareProfile, limits: MemoryLimits) -> int | None:
    """Return the first of a half, a quarter ... of the micro-batch or sequence with which a plan fits, or None."""
    size = getattr(job, option) // 2
    while size and not Predictor(replace(job, **{option: size}), profile, limits).fits:
        size //= 2
    return size or None


def _more_ranks(job: Job) -> Iterator[int]:
    """Yield the ranks doubled again and again, including the ranks of one full node.

    Counts are left out whose ranks of a node the tensor-parallel size does not divide.
    """
    ranks = job.world_size
    while 2 * ranks <= MAX_RANKS:
        ranks = 2 * ranks if ranks >= job.ranks_per_node else min(2 * ranks, job.ranks_per_node)
        if min(ranks, job.ranks_per_node) % job.tensor_parallel == 0:
            yield ranks
