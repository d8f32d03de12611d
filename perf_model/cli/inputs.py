"""Read the inputs of a command that plans for a training run: the machine, the model, the job and the limits."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from perf_model.prediction.hardware import HardwareProfile, ProfileError
from perf_model.presets.machines import MACHINES, MachinePreset
from perf_model.presets.models import MODELS
from perf_model.search.budgets import DoesNotFit
from perf_model.search.planner import SUB_GROUP_SIZES
from perf_model.training_run.forecast import Forecast, MemoryLimits, Overlap, find_remedy, forecast
from perf_model.training_run.hf_config import read_hf_config
from perf_model.training_run.job import Job
from perf_model.training_run.model import ModelError, ModelShape, require_integer

MAX_SUB_GROUPS = 10_000
"""Planning for this many sub-groups takes seconds; for many more it would take hours."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The checked inputs of one forecast. ``profile_path`` is None where the profile is a preset."""

    job: Job
    profile: HardwareProfile
    limits: MemoryLimits
    overlap: Overlap
    sub_group_sizes: tuple[int, ...]
    profile_path: Path | None

    def forecast(self) -> Forecast:
        """Return the forecast of the best plan. Raise ``DoesNotFit``, with a remedy that fits, if no plan does."""
        try:
            return forecast(self.job, self.profile, self.limits, self.overlap, self.sub_group_sizes)
        except DoesNotFit as error:
            remedy = find_remedy(self.job, self.profile, self.limits, self.sub_group_sizes)
            raise DoesNotFit(error.missing, remedy) from None


def read_inputs(options: argparse.Namespace, world_size: int, micro_batch: int) -> Inputs:
    """Return the inputs that ``options`` name. Raise ``ModelError`` or ``ProfileError`` if they cannot be used."""
    job = Job(
        shape=_model(options.model),
        world_size=world_size,
        ranks_per_node=options.ranks_per_node,
        micro_batch=micro_batch,
        sequence=options.sequence,
        recompute=not options.no_recompute,
    )
    if options.sub_group_size is not None:
        _check_sub_group_size(options.sub_group_size, job)
    preset = options.profile in MACHINES
    profile = _preset(MACHINES[options.profile], job) if preset else _profile(Path(options.profile))
    if options.gpu_memory_gb is not None and not profile.has_accelerator:
        rule = f"--gpu-memory-gb: needs a profile of a machine with a GPU, found {options.profile}, which has none."
        raise ModelError(f"{rule}\nLeave it out, or plan for another machine.")
    return Inputs(
        job=job,
        profile=profile,
        limits=MemoryLimits(
            gpu=profile.gpu_memory_bytes if options.gpu_memory_gb is None else options.gpu_memory_gb,
            host=profile.host_memory_bytes if options.host_memory_gb is None else options.host_memory_gb,
            pinned=options.pinned_memory_gb,
        ),
        overlap=Overlap(
            backward=options.overlap in ("backward", "both"), forward=options.overlap in ("forward", "both")
        ),
        sub_group_sizes=SUB_GROUP_SIZES if options.sub_group_size is None else (options.sub_group_size,),
        profile_path=None if preset else Path(options.profile),
    )


def _model(name: str) -> ModelShape:
    return MODELS[name] if name in MODELS else read_hf_config(Path(name))


def _check_sub_group_size(size: int, job: Job) -> None:
    """Raise ``ModelError`` if ``size`` is impossible, or makes so many sub-groups that planning would take hours."""
    require_integer("sub_group_size", size, 1, 10**15, "Correct --sub-group-size.")
    count = len(job.workload(size).sub_groups)
    if count > MAX_SUB_GROUPS:
        rule = f"sub_group_size: must make at most {MAX_SUB_GROUPS:,} sub-groups per rank, found {count:,} with {size}"
        raise ModelError(f"{rule}.\nGive a larger --sub-group-size.")


def _preset(machine: MachinePreset, job: Job) -> HardwareProfile:
    if job.ranks_on_node > machine.cores:
        rule = f"ranks_per_node: must be at most {machine.cores}, the number of cores of {machine.name}"
        raise ModelError(f"{rule}, found {job.ranks_on_node}.\nCorrect --ranks-per-node, the GPUs per host.")
    return machine.profile(job.ranks_on_node)


def _profile(path: Path) -> HardwareProfile:
    try:
        return HardwareProfile.read(path)
    except ProfileError as error:
        # Path.exists would raise for a text that no path can be, such as a null character; os.path.exists does not.
        if os.path.exists(path):
            raise
        raise ProfileError(f"{error}\nOr plan for a preset: {', '.join(MACHINES)}.") from None
