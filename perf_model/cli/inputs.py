"""Read the inputs of a command that plans for a training run: the machine, the model, the job and the limits."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from perf_model.cli.machine_options import MIN_HOST_GB_PER_S, ChosenMachine, read_machine
from perf_model.json_input import parse_json, printable, read_text, reason
from perf_model.planner import UNIT_SIZES
from perf_model.prediction.hardware import HardwareProfile, ProfileError
from perf_model.prediction.memory import GPU_MARGIN_BYTES, DoesNotFit
from perf_model.presets.machines import MACHINES, MachinePreset
from perf_model.presets.models import MODELS
from perf_model.schedule.cutting import PIECE_MULTIPLE
from perf_model.schedule.placement import Placement
from perf_model.schedule.rules import NO_RULES, PlacementRules, RulesError
from perf_model.training_run.forecast import Forecast, forecast
from perf_model.training_run.generic_model import generic_model
from perf_model.training_run.hf_config import read_hf_config
from perf_model.training_run.job import DEFAULT_SUB_GROUP_SIZE, Job
from perf_model.training_run.micro_batch import NO_OVERHEADS, PUBLISHED_OVERHEADS, Overheads
from perf_model.training_run.model import ModelError, ModelShape, require_integer
from perf_model.training_run.predictor import MemoryLimits, Overlap
from perf_model.training_run.remedies import find_remedy, limits_to_lift
from perf_model.units import GB

MAX_UNIT_SIZE = 10**15
MAX_UNITS = 10_000
"""Planning for this many units takes seconds; for many more it would take hours."""

CONFIG_OPTIONS = ("unit_size", "gpu_memory_gb", "gpu_memory_margin_gb", "sub_group_size")
"""The options without which the config has no such key: then training chooses as the command does."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The checked inputs of one forecast. ``profile_path`` is None where the profile is a preset.

    ``model`` is the preset, the path of the config.json, or the number of parameters that the user gave.
    ``given`` are the names of the options in ``CONFIG_OPTIONS`` that the user gave, and ``given_figures`` those of the
    figures of the machine (``FIGURES``) that replace a preset's.
    """

    job: Job
    profile: HardwareProfile
    limits: MemoryLimits
    overlap: Overlap
    unit_sizes: tuple[int, ...]
    model: str
    profile_path: Path | None
    given: frozenset[str]
    given_figures: frozenset[str]

    @property
    def overheads(self) -> Overheads:
        """Return the fixed seconds of the host: those of the published runs if a GPU trains, for the lack of others."""
        return PUBLISHED_OVERHEADS if self.profile.has_accelerator else NO_OVERHEADS

    def forecast(self) -> Forecast:
        """Return the forecast of the best plan. Raise ``DoesNotFit``, with a remedy that fits, if no plan does."""
        try:
            return forecast(self.job, self.profile, self.limits, self.overlap, self.unit_sizes, self.overheads)
        except DoesNotFit as error:
            remedy = find_remedy(self.job, self.profile, self.limits)
            raise DoesNotFit(error.missing, f"{limits_to_lift(error.missing)}\n{remedy}") from None


def read_inputs(options: argparse.Namespace, world_size: int | None, micro_batch: int) -> Inputs:
    """Return the inputs that ``options`` name. Raise ``ModelError`` or ``ProfileError`` if they cannot be used.

    ``world_size`` is None if it follows from the nodes.
    """
    return read_inputs_of_sizes(options, [(world_size, micro_batch)])[0]


def read_inputs_of_sizes(options: argparse.Namespace, sizes: Iterable[tuple[int | None, int]]) -> list[Inputs]:
    """Return the inputs as ``read_inputs`` does for each pair of world size and micro-batch. Each file is read once."""
    sizes = list(sizes)
    if options.nodes is not None and any(world_size is not None for world_size, _ in sizes):
        rule = f"--nodes: must be absent where the number of ranks is given, found {options.nodes}"
        raise ModelError(
            f"{rule}.\nLeave out --nodes, or --world-size (--gpus of a cluster, --world-sizes of a sweep)."
        )
    machine = read_machine(options)
    shape = _with_shared_layers(_model(options), options.share_layers, options.every)
    rules = NO_RULES if options.rules is None else _read_rules(options.rules)
    measured = None if machine.path is None else _profile(machine.path)
    return [
        _inputs(options, machine, shape, rules, measured, world_size, micro_batch) for world_size, micro_batch in sizes
    ]


def _inputs(
    options: argparse.Namespace,
    machine: ChosenMachine,
    shape: ModelShape,
    rules: PlacementRules,
    measured: HardwareProfile | None,
    world_size: int | None,
    micro_batch: int,
) -> Inputs:
    job = Job(
        shape=shape,
        world_size=machine.world_size() if world_size is None else world_size,
        ranks_per_node=machine.ranks_per_node(),
        micro_batch=micro_batch,
        sequence=options.sequence,
        recompute=not options.no_recompute,
        accumulation=options.accumulation,
        offload_param=options.offload_param,
        trainable_share=options.trainable_share,
        tensor_parallel=options.tensor_parallel,
        attention=options.attention,
        sub_group_size=DEFAULT_SUB_GROUP_SIZE if options.sub_group_size is None else options.sub_group_size,
    )
    try:
        job = replace(job, rules=rules)
    except RulesError as error:
        raise ModelError(f"--rules {printable(options.rules)}: {error}") from None
    if options.unit_size is not None:
        _check_unit_size(options.unit_size, job)
    profile = _preset(machine.preset, job) if measured is None else measured
    _check_rules(job, profile)
    for name in ("gpu_memory_gb", "gpu_memory_margin_gb", "offload_param"):
        value = getattr(options, name)
        if value is not None and value is not False and not profile.has_accelerator:
            option = f"--{name.replace('_', '-')}"
            found = printable(str(machine.path))
            rule = f"{option}: needs a profile of a machine with a GPU, found {found}, which has none."
            raise ModelError(f"{rule}\nLeave it out, or plan for another machine.")
    return Inputs(
        job=job,
        profile=profile,
        limits=MemoryLimits(
            gpu=profile.gpu_memory_bytes if options.gpu_memory_gb is None else options.gpu_memory_gb,
            host=profile.host_memory_bytes if options.host_memory_gb is None else options.host_memory_gb,
            pinned=options.pinned_memory_gb,
            gpu_margin=GPU_MARGIN_BYTES if options.gpu_memory_margin_gb is None else options.gpu_memory_margin_gb,
        ),
        overlap=Overlap(
            backward=options.overlap in ("backward", "both"), forward=options.overlap in ("forward", "both")
        ),
        unit_sizes=UNIT_SIZES if options.unit_size is None else (options.unit_size,),
        model=printable(options.model) if options.params is None else f"{options.params} parameters",
        profile_path=machine.path,
        given=frozenset(name for name in CONFIG_OPTIONS if getattr(options, name) is not None),
        given_figures=machine.given,
    )


def _model(options: argparse.Namespace) -> ModelShape:
    """Return the preset, the model of the config.json, or one with the number of parameters ``--params``."""
    if options.params is not None:
        return generic_model(options.params, options.layers, options.hidden)
    for name in ("layers", "hidden"):
        if (value := getattr(options, name)) is not None:
            rule = f"--{name}: must come with --params, found {value} with --model"
            raise ModelError(f"{rule}.\nLeave it out: a preset or a config.json has the {name} of its model.")
    return MODELS[options.model] if options.model in MODELS else read_hf_config(Path(options.model))


def _with_shared_layers(shape: ModelShape, path: str | None, every: int | None) -> ModelShape:
    """Return ``shape`` with the layers in the list ``path`` sharing the parameters of the first ``every``."""
    if path is not None:
        return shape.share_layers(path, 1 if every is None else every)
    if every is not None:
        raise ModelError(f"--every: must come with --share-layers, found {every} alone.\nName the list of the layers.")
    return shape


def _read_rules(path: Path) -> PlacementRules:
    """Return the rules in the file ``path``. Raise ``ModelError`` if it has none."""
    try:
        return PlacementRules.from_json(parse_json(read_text(path)))
    except RulesError as error:
        raise ModelError(f"--rules {printable(path)}: {error}") from None
    except (OSError, ValueError) as error:
        rule = f"--rules: must be a readable file with a JSON list, found {printable(path)}: {reason(error)}."
        raise ModelError(f'{rule}\nFor example: [{{"match": "lm_head.*", "states": "resident"}}]') from None


def _check_rules(job: Job, profile: HardwareProfile) -> None:
    """Raise ``ModelError`` if a rule updates units on the GPU, and ``profile`` has no rate of Adam there."""
    on_gpu = [rule.states for rule in job.rules.rules if rule.placement not in (None, Placement.CPU)]
    if on_gpu and profile.get("gpu_adam_params_per_s") is None:
        why = profile.why_missing("gpu_adam_params_per_s")
        rule = f'--rules: "{on_gpu[0]}" needs a rate of Adam on the GPU, found none ({why})'
        raise ModelError(f"{rule}.\nRemove the rule, or plan with another profile.")


def _check_unit_size(size: int, job: Job) -> None:
    """Raise ``ModelError`` if ``size`` is impossible, or makes so many units that planning would take hours."""
    require_integer("unit_size", size, 1, MAX_UNIT_SIZE, "Correct --unit-size.")
    # With a tiny size, cutting alone would take hours.
    least = job.workload(MAX_UNIT_SIZE).numel // (size + PIECE_MULTIPLE)
    count = least if least > MAX_UNITS else len(job.workload(size).units)
    if count > MAX_UNITS:
        rule = f"unit_size: must make at most {MAX_UNITS:,} units per rank, found {count:,} or more with {size}"
        raise ModelError(f"{rule}.\nGive a larger --unit-size.")


def _preset(machine: MachinePreset | None, job: Job) -> HardwareProfile:
    assert machine is not None, "without a path there is a preset"
    if job.ranks_on_node > machine.cores:
        rule = f"ranks_per_node: must be at most {machine.cores}, the number of cores of {machine.name}"
        raise ModelError(f"{rule}, found {job.ranks_on_node}.\nCorrect --ranks-per-node, the GPUs per host.")
    host_gb_per_s = machine.host_bytes_per_s / GB
    if host_gb_per_s < MIN_HOST_GB_PER_S * job.ranks_on_node:
        rule = f"--host-bandwidth-gb-per-s: must be at least {MIN_HOST_GB_PER_S} GB/s for each rank of a node"
        found = f"{host_gb_per_s:g} GB/s for {job.ranks_on_node} ranks"
        raise ModelError(f"{rule}, found {found}.\nCorrect it, or --ranks-per-node, the GPUs per host.")
    return machine.profile(job.ranks_on_node)


def _profile(path: Path) -> HardwareProfile:
    try:
        return HardwareProfile.read(path)
    except ProfileError as error:
        # Path.exists would raise for a text that no path can be, such as a null character; os.path.exists does not.
        if os.path.exists(path):
            raise
        raise ProfileError(f"{error}\nOr plan for a preset: {', '.join(MACHINES)}.") from None
