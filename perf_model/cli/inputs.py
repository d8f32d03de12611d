"""Read the inputs of a planning command: the machine, the model, the job and the limits."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from perf_model.json_input import parse_json, printable, read_text, reason
from perf_model.planner import UNIT_SIZES
from perf_model.prediction.cost import DiskRates
from perf_model.prediction.hardware import HardwareProfile, ProfileError
from perf_model.prediction.memory import GPU_MARGIN_BYTES
from perf_model.presets.machines import ALIASES, FIGURES, MACHINES, MachinePreset
from perf_model.presets.models import MODELS
from perf_model.schedule.cutting import PIECE_MULTIPLE
from perf_model.schedule.placement import Placement
from perf_model.schedule.rules import EXAMPLE, NO_RULES, PlacementRules, RulesError
from perf_model.training_run.decoder import generic_model
from perf_model.training_run.forecast import Forecast, MemoryLimits, Overlap
from perf_model.training_run.hf_config import read_hf_config
from perf_model.training_run.job import DEFAULT_SUB_GROUP_SIZE, Job
from perf_model.training_run.model import ModelError, ModelShape, require_integer

MAX_UNITS = 10_000
"""The most units per rank: planning for them takes seconds, and for many more it would take hours."""

MOST_RANKS_PER_NODE = 8
"""The most ranks that are assumed to share a host if ``--ranks-per-node`` is not given."""

CONFIG_OPTIONS = ("unit_size", "gpu_memory_gb", "host_memory_gb", "gpu_memory_margin_gb", "sub_group_size")
"""The options that are written to the config only if the user gave them."""

FIELDS_OF_OPTIONS = (
    *("sequence", "accumulation", "offload_param", "trainable_share", "tensor_parallel", "attention", "states"),
)
"""The options with the names and values of fields of ``Job``."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The checked inputs of one forecast. ``given`` contains the options of ``CONFIG_OPTIONS`` that the user gave."""

    job: Job
    profile: HardwareProfile
    limits: MemoryLimits
    overlap: Overlap
    unit_sizes: tuple[int, ...]
    model: str
    profile_path: Path | None
    given: frozenset[str]

    def forecast(self) -> Forecast:
        """Return the forecast of the best plan. Raise ``DoesNotFit``, with the remedy, if none fits."""
        return Forecast(self.job, self.profile, self.limits, self.overlap, self.unit_sizes)


def read_inputs(options: argparse.Namespace, *sizes: tuple[int | None, int]) -> list[Inputs]:
    """Return the inputs for each pair of world size and micro-batch. Raise ``ModelError`` or ``ProfileError``."""
    machine, shape = read_machine(options), read_model(options)
    try:
        rules = NO_RULES if options.rules is None else _read_rules(options.rules)
        return [_inputs(options, machine, _job(options, shape, rules, *size)) for size in sizes]
    except RulesError as error:
        raise ModelError(f"--rules {options.rules}: {error}") from None


def read_machine(options: argparse.Namespace) -> MachinePreset | HardwareProfile:
    """Return the preset with the figures that the user gave, or the profile in the file. Raise ``ProfileError``."""
    changes = {name: value for name in FIGURES if (value := getattr(options, name)) is not None}
    if (preset := MACHINES.get(ALIASES.get(options.profile, options.profile))) is not None:
        return preset.changed(changes) if changes else preset
    if changes:
        rule = f"--{next(iter(changes)).replace('_', '-')}: changes a preset, found the profile {options.profile}"
        raise ProfileError(f"{rule}.\nLeave it out, or plan for a preset: {', '.join(MACHINES)}.")
    try:
        return HardwareProfile.read(Path(options.profile))
    except ProfileError as error:
        # Path.exists would raise for a text that no path can be.
        if os.path.exists(options.profile):
            raise
        near = get_close_matches(options.profile.lower(), (*MACHINES, *ALIASES), n=3) or (*MACHINES, *ALIASES)
        figures = ", ".join(f"--{name.replace('_', '-')}" for name in FIGURES)
        raise ProfileError(
            f"{error}\nOr plan for a preset: {', '.join(near)}. plan --list describes all. For another machine, change "
            f"the figures of one: {figures}, --gpu-memory-gb."
        ) from None


def _job(
    options: argparse.Namespace, shape: ModelShape, rules: PlacementRules, world_size: int | None, micro_batch: int
) -> Job:
    ranks_per_node = options.ranks_per_node
    if ranks_per_node is None:
        ranks_per_node = max(1, min(world_size or 1, MOST_RANKS_PER_NODE))
    if world_size is None:
        world_size = ranks_per_node * (1 if options.nodes is None else options.nodes)
    return Job(
        shape=shape,
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        micro_batch=micro_batch,
        recompute=not options.no_recompute,
        sub_group_size=DEFAULT_SUB_GROUP_SIZE if options.sub_group_size is None else options.sub_group_size,
        rules=rules,
        **{name: getattr(options, name) for name in FIELDS_OF_OPTIONS},
    )


def _inputs(options: argparse.Namespace, machine: MachinePreset | HardwareProfile, job: Job) -> Inputs:
    if options.unit_size is not None:
        _check_unit_size(options.unit_size, job)
    profile, path = machine, None
    if isinstance(profile, HardwareProfile):
        path = Path(options.profile)
    elif job.ranks_on_node <= profile.cores:
        profile = profile.profile(job.ranks_on_node)
    else:
        rule = f"ranks_per_node: must be at most {profile.cores}, the number of cores of {profile.name}"
        raise ModelError(f"{rule}, found {job.ranks_on_node}.\nCorrect --ranks-per-node, the GPUs per host.")
    _check_rules(job, profile)
    if (of_node := options.nvme or DiskRates.from_profile(profile)) is not None:
        job = replace(job, disk=DiskRates(*(rate / job.ranks_on_node for rate in of_node)))
    for name in ("gpu_memory_gb", "gpu_memory_margin_gb", "eager_memory_gb", "offload_param"):
        value = getattr(options, name)
        if value is not None and value is not False and not profile.has_accelerator:
            rule = f"--{name.replace('_', '-')}: needs a profile of a machine with a GPU, found {options.profile}"
            raise ModelError(f"{rule}, which has none.\nLeave it out, or plan for another machine.")
    return Inputs(
        job=job,
        profile=profile,
        limits=MemoryLimits(
            gpu=profile.gpu_memory_bytes if options.gpu_memory_gb is None else options.gpu_memory_gb,
            host=profile.host_memory_bytes if options.host_memory_gb is None else options.host_memory_gb,
            pinned=options.pinned_memory_gb,
            gpu_margin=GPU_MARGIN_BYTES if options.gpu_memory_margin_gb is None else options.gpu_memory_margin_gb,
            eager=options.eager_memory_gb,
        ),
        overlap=Overlap(**{phase: options.overlap in (phase, "both") for phase in ("backward", "forward")}),
        unit_sizes=UNIT_SIZES if options.unit_size is None else (options.unit_size,),
        model=options.model if options.params is None else f"{options.params} parameters",
        profile_path=path,
        given=frozenset(name for name in CONFIG_OPTIONS if getattr(options, name) is not None),
    )


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Raise ``ModelError`` if the file of ``option`` cannot be written inside."""
    try:
        yield
    except (OSError, ValueError) as error:
        rule = f"{option}: must be a file that can be written, found {printable(path)}: {reason(error)}"
        raise ModelError(f"{rule}.\nName another file.") from None


def _read_rules(path: Path) -> PlacementRules:
    rule, remedy = "must be a readable file with a JSON list", f"For example: [{EXAMPLE}]"
    text = read_text(path, f"--rules: {rule}", remedy, ModelError)
    return PlacementRules.from_json(parse_json(text, f"--rules {printable(path)}: {rule}", remedy, ModelError))


def _check_rules(job: Job, profile: HardwareProfile) -> None:
    on_gpu = [rule.states for rule in job.rules.rules if rule.placement not in (None, Placement.CPU)]
    if on_gpu and profile.get("gpu_adam_params_per_s") is None:
        why = profile.why_missing("gpu_adam_params_per_s")
        rule = f'--rules: "{on_gpu[0]}" needs a rate of Adam on the GPU, found none ({why})'
        raise ModelError(f"{rule}.\nRemove the rule, or plan with another profile.")


def _check_unit_size(size: int, job: Job) -> None:
    require_integer("unit_size", size, 1, 10**15, "Correct --unit-size.")
    least = sum(partition.numel for group in job.sub_groups for partition in group) // (size + PIECE_MULTIPLE)
    if least > MAX_UNITS:
        rule = f"unit_size: must make at most {MAX_UNITS:,} units per rank, found {least:,} or more with {size}"
        raise ModelError(f"{rule}.\nGive a larger --unit-size.")


def read_model(options: argparse.Namespace) -> ModelShape:
    """Return the shape of the model in the options. Raise ``ModelError``."""
    for name, needed in (("layers", "params"), ("hidden", "params"), ("every", "share_layers")):
        if (value := getattr(options, name)) is not None and getattr(options, needed) is None:
            rule = f"--{name}: must come with --{needed.replace('_', '-')}, found {value} alone"
            raise ModelError(f"{rule}.\nGive both, or neither.")
    if options.params is not None:
        shape = generic_model(options.params, options.layers, options.hidden)
    else:
        shape = MODELS[options.model] if options.model in MODELS else _from_config(options.model)
    if options.share_layers is None:
        return shape
    return shape.share_layers(options.share_layers, 1 if options.every is None else options.every)


def _from_config(name: str) -> ModelShape:
    """Return the model of a ``config.json``, of a folder with one, or of a name in the cache of Hugging Face."""
    path = os.path.join(name, "config.json") if os.path.isdir(name) else name
    is_on_hub = re.fullmatch(r"([\w.-]+/)?[\w.-]+", name, re.ASCII) is not None
    # Path.exists would raise for a text that no path can be.
    if not os.path.exists(path) and is_on_hub and (cached := _cached_config(name)) is not None:
        return read_hf_config(cached, name.rpartition("/")[2])
    try:
        return read_hf_config(Path(path))
    except ModelError as error:
        if os.path.exists(path):
            raise
        by_name = {preset.lower(): preset for preset in MODELS}
        near = [by_name[match] for match in get_close_matches(name.rpartition("/")[2].lower(), by_name)]
        page = name if is_on_hub and "/" in name else "ORGANISATION/MODEL"
        rule, _, _ = str(error).partition("\n")
        raise ModelError(
            f"{rule}\nPresets: {', '.join(near or MODELS)}. Or download https://huggingface.co/{page}/blob/main/config.json"
            " and give its path. Or give --params with the number of parameters."
        ) from None


def _cached_config(name: str) -> Path | None:
    """Return the newest ``config.json`` of the model ``name`` in the local cache of Hugging Face, None without one."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    hub = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    found = hub.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json")
    return max(found, key=lambda path: path.lstat().st_mtime, default=None)
