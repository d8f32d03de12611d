"""What every command about a training run is told: the machine, the model, the job and the limits."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from perf_model.prediction.hardware import HardwareProfile, ProfileError
from perf_model.presets.machines import MACHINES, Machine
from perf_model.presets.models import MODELS
from perf_model.search.budgets import DoesNotFit
from perf_model.search.planner import SUB_GROUP_SIZES
from perf_model.training_run.forecast import NO_OVERLAP, Forecast, MemoryLimits, Overlap, forecast, what_would_fit
from perf_model.training_run.hf_config import read_hf_config
from perf_model.training_run.job import Job
from perf_model.training_run.model import ModelError, ModelShape, require_integer
from perf_model.units import GB

OVERLAPS = {
    "none": NO_OVERLAP,
    "backward": Overlap(forward=False),
    "forward": Overlap(backward=False),
    "both": Overlap(),
}

MOST_SUB_GROUPS = 10_000
"""A plan of so many takes seconds."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    job: Job
    profile: HardwareProfile
    limits: MemoryLimits
    overlap: Overlap
    sub_group_sizes: tuple[int, ...]
    profile_path: Path | None

    def forecast(self) -> Forecast:
        """Raises ``DoesNotFit`` that says what would fit."""
        try:
            return forecast(self.job, self.profile, self.limits, self.overlap, self.sub_group_sizes)
        except DoesNotFit as error:
            remedy = what_would_fit(self.job, self.profile, self.limits, self.sub_group_sizes)
            raise DoesNotFit(error.missing, remedy) from None


def add_arguments(parser: argparse.ArgumentParser, job: bool = True) -> None:
    """``job``: one world size and one micro-batch."""
    machines, models = ", ".join(MACHINES), ", ".join(MODELS)
    parser.add_argument("--profile", required=True, help=f"a file that 'profile' wrote, or a preset: {machines}")
    parser.add_argument("--model", required=True, help=f"a Hugging Face config.json, or a preset: {models}")
    if job:
        parser.add_argument("--world-size", type=int, required=True, help="ranks, one a GPU")
        parser.add_argument("--micro-batch", type=int, required=True, help="sequences of a rank in one step")
    parser.add_argument("--ranks-per-node", type=int, required=True, help="ranks that share a host")
    parser.add_argument("--sequence", type=int, required=True, help="tokens of a sequence")
    parser.add_argument("--no-recompute", action="store_true", help="activations are kept, not recomputed in backward")
    parser.add_argument("--gpu-memory-gb", type=_gb, help="of one GPU; by default what the profile says")
    parser.add_argument("--host-memory-gb", type=_gb, help="of one node; by default what the profile says")
    parser.add_argument("--pinned-memory-gb", type=_gb, help="that one rank may page-lock; by default unlimited")
    parser.add_argument("--sub-group-size", type=int, help="by default the best of several is planned")
    about = "what the update runs beside; by default both, as in training that is not told otherwise"
    parser.add_argument("--overlap", choices=OVERLAPS, default="both", help=about)


def read_inputs(options: argparse.Namespace, world_size: int, micro_batch: int) -> Inputs:
    """Raises ``ModelError`` or ``ProfileError``."""
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
        rule = f"--gpu-memory-gb: belongs to a profile of a machine with a GPU, found {options.profile} without one."
        raise ModelError(f"{rule}\nLeave it out, or plan for another machine.")
    return Inputs(
        job=job,
        profile=profile,
        limits=MemoryLimits(
            gpu=profile.gpu_memory_bytes if options.gpu_memory_gb is None else options.gpu_memory_gb,
            host=profile.host_memory_bytes if options.host_memory_gb is None else options.host_memory_gb,
            pinned=options.pinned_memory_gb,
        ),
        overlap=OVERLAPS[options.overlap],
        sub_group_sizes=SUB_GROUP_SIZES if options.sub_group_size is None else (options.sub_group_size,),
        profile_path=None if preset else Path(options.profile),
    )


def _model(name: str) -> ModelShape:
    return MODELS[name] if name in MODELS else read_hf_config(Path(name))


def _check_sub_group_size(size: int, job: Job) -> None:
    require_integer("sub_group_size", size, 1, 10**15, "Correct --sub-group-size.")
    count = len(job.workload(size).sub_groups)
    if count > MOST_SUB_GROUPS:
        rule = (
            f"sub_group_size: must make at most {MOST_SUB_GROUPS:,} sub-groups of a rank, found {count:,} with {size}"
        )
        raise ModelError(f"{rule}.\nGive a larger --sub-group-size.")


def _preset(machine: Machine, job: Job) -> HardwareProfile:
    if job.ranks_of_a_node > machine.cores:
        rule = f"ranks_per_node: must be at most {machine.cores}, the cores of {machine.name}"
        raise ModelError(f"{rule}, found {job.ranks_of_a_node}.\nCorrect --ranks-per-node, the GPUs of one host.")
    return machine.profile(job.ranks_of_a_node)


def _profile(path: Path) -> HardwareProfile:
    try:
        return HardwareProfile.read(path)
    except ProfileError as error:
        # Unlike Path.exists, False for what is no path at all.
        if os.path.exists(path):
            raise
        raise ProfileError(f"{error}\nOr plan for a preset: {', '.join(MACHINES)}.") from None


def _gb(text: str) -> int:
    """Bytes. Raises ``ArgumentTypeError`` for what is no such number."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 1e-9 <= value <= 1e9:
        raise argparse.ArgumentTypeError(f"must be a number of GB (10^9 bytes) from 1e-9 to 1e9, found {text!r}")
    return max(1, int(value * GB))
