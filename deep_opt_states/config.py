"""Parse and validate the ``deep_optimizer_states`` block of the DeepSpeed JSON config."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    InstanceOf,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from deep_opt_states import log
from deep_opt_states.names import CONFIG_KEY, SWITCH, IgnoredBlock
from perf_model.json_input import printable, shorten
from perf_model.prediction.memory import DEFAULT_SETUP, GPU_MARGIN_BYTES, TrainingSetup
from perf_model.schedule.cutting import DISK_UNIT_SIZE, cut_into_units
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import DEFAULT_NUM_SLOTS, UpdatePlan, place_all, place_by_stride
from perf_model.schedule.rules import NO_RULES, PlacementRules, RulesError, did_you_mean
from perf_model.schedule.workload import Partition, Workload
from perf_model.units import GB

DEFAULT_UNIT_SIZE = 50_000_000
"""The most parameters of a unit where neither the config nor the planner chooses."""

MAX_MESSAGES, MAX_KEYS = 5, 100
"""The most invalid keys in one error, and the most characters of keys."""

_RETIRED = {
    "untested_deepspeed": "an untested release gives a warning. To exclude it, pin DeepSpeed in your environment.",
    "split_masters": 'DeepSpeed\'s "bf16_master_weights_and_grads" and "bf16_optimizer_states" save memory.',
    "gpu_fraction": 'use "placement": "planned", or "stride" with "update_stride": 2 to stream every second unit.',
}
"""The replacement of each key of an earlier release that is refused."""


class ConfigError(ValueError):
    """An error with two lines per invalid key: the dotted key with the rule and the value found, and the remedy."""


class Unsupported(ValueError):
    """The error for a feature, or a release of DeepSpeed, that the enabled plugin does not support."""


class _RuleError(ValueError):
    """The error for a rule that pydantic's types do not state."""

    def __init__(self, key: str, rule: str, found: object, remedy: str) -> None:
        super().__init__(rule)
        self.key = key
        self.message = _message(key, rule, found, remedy)


class Config(BaseModel):
    """The ``deep_optimizer_states`` block. A field's docstring is data: the documentation and errors show it."""

    # Strict, so that a typo such as "2" or 1 is refused instead of being interpreted.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    enabled: bool = True
    """Whether the plugin is active. With `false`, stock DeepSpeed trains."""

    placement: (
        Literal["planned", "cpu", "streamed", "stride"]
        | Annotated[InstanceOf[PlacementRules], WithJsonSchema({"type": "array", "items": {"type": "object"}})]
    ) = "planned"
    """Where optimizer states are kept and updated, by unit: a part of a sub-group, cut along layers where possible.
    `"planned"` chooses the placements with the shortest predicted exposed update time; `"cpu"` updates all units on the
    CPU; `"streamed"` copies each unit to the accelerator, updates it there and copies it back; `"stride"` streams every
    k-th unit, where `update_stride` is k, and updates the others on the CPU. A list of objects places parameters by
    name, also `"resident"` in the accelerator's memory: see [Rules by name](#rules-by-name)."""

    update_stride: int | None = Field(default=None, ge=2)
    """The stride k of `"placement": "stride"`, which requires the key; any other placement refuses it. Unit i, counted
    from 0, is streamed if i + 1 is a multiple of k."""

    unit_size: int | None = Field(default=None, ge=1)
    """The most parameters of a unit on each rank, rounded up to a multiple of 256. Defaults to the planner's choice, or
    to 50,000,000 if nothing is left to the planner. DeepSpeed's sub-groups and checkpoints do not depend on it."""

    num_slots: int | None = Field(default=None, ge=1)
    """The number of staging slots on the accelerator, through which streamed units pass. Each has the size of the
    largest streamed unit, at 12 bytes per parameter (10 or 6 with bf16 states). More slots prefetch more states in
    backward, and let more flushes overlap with the next backward. Defaults to 2, and never changes in training: the
    slots must fit in addition to all that training needs. Where something is left to the planner, it chooses this
    number, and the key is refused."""

    profile: str | None = Field(default=None, min_length=1)
    """The path of a hardware profile from which the plugin plans and predicts; `deep-opt-states profile` writes one. By
    default, a quick profile is measured at start if the planner or `report` needs one, and is cached for this hardware
    and software ([caches](api.md#caches)). With a fixed placement, a profile adds predictions to the reports."""

    cpu_threads: int | None = Field(default=None, ge=1)
    """The number of threads with which each rank updates on the CPU. Defaults to one per physical core of the rank's
    share of its node; on a GPU, less the cores that launch its kernels ([CPU cores](#cpu-cores)). `OMP_NUM_THREADS` has
    no effect on it."""

    bind_cores: bool = True
    """Whether to pin the threads of the CPU update to cores of their own, near the rank's GPU, and to keep all other
    threads of the process off these cores. No effect on the CPU accelerator."""

    gpu_memory_gb: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    """The memory of each GPU that the planner may use for staging slots, resident states and summed gradients, in GB
    (10^9 bytes), in addition to the three staging buffers for gradients. Defaults to 0 at start, and after the first
    steps to the memory that was free at their peak, less `gpu_memory_margin_gb`. A number is a limit from the start on.
    In both cases, less is used when memory becomes short. A placement that leaves nothing to the planner refuses the
    key. No effect on the CPU accelerator."""

    gpu_memory_margin_gb: float = Field(default=GPU_MARGIN_BYTES / GB, ge=0.0, allow_inf_nan=False)
    """The memory of each GPU that states and slots leave free, in GB (10^9 bytes). When half of it is taken, memory
    counts as short: all states are evicted, and the planner plans once more for the memory that is left. The log
    reports each change."""

    host_memory_gb: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    """The host memory that the optimizer may take on each node, in GB (10^9 bytes), if `offload_optimizer.device` is
    `"nvme"`: states that do not fit are on disk. Defaults to the memory that is free at start, less a tenth of the
    node's. Gradients and the parameters to publish, 4 bytes per parameter of a 16-bit model, are always in host
    memory."""

    nvme_paths: list[str] | None = Field(default=None, min_length=1)
    """Folders on further disks, in addition to `nvme_path` of `offload_optimizer`. Each state on disk is divided
    equally among all folders, which are used at the same time."""

    overlap_backward: bool = True
    """Whether to prefetch the states of streamed units into free staging slots during backward."""

    overlap_forward: bool = True
    """Whether the update overlaps with the next forward. `step()` then returns when the gradient norm is known and the
    persistent parameters are updated; all other units are updated before forward uses their parameters. No effect with
    `wall_clock_breakdown`, `flops_profiler` or, on a GPU, `timers.throughput.synchronized`, which defaults to `false`
    with the plugin."""

    eager: bool | Literal["planned"] = "planned"
    """Whether updates start in backward, as soon as the gradients of a unit are complete, into a second version of its
    states: 12 bytes of host memory per parameter (10 or 6 with bf16 states). If the step is clipped or skipped, the
    unit is updated again from its untouched states. `"planned"` lets the planner choose these units, within half of the
    free host memory; `true` takes all that are not resident, with `offload_param` only units of the CPU. No effect with
    `"overlap_backward": false`."""

    log_every: int = Field(default=100, ge=1)
    """The number of steps from one line of [the log](monitoring.md#the-log) to the next. DeepSpeed's `steps_per_print`
    sets only DeepSpeed's own lines."""

    report: str | None = Field(default=None, min_length=1)
    """The path of a folder into which rank 0 writes its measurements, for `deep-opt-states report`. By default, nothing
    is written."""

    @field_validator("placement", mode="before")
    @classmethod
    def _parse_rules(cls, value: object) -> object:
        value = list(value) if isinstance(value, tuple) else value
        if isinstance(value, list) and not any(isinstance(entry, Mapping) for entry in value):
            remedy = 'Name parameters: [{"match": "*.mlp.*", "states": "streamed"}, {"match": "*", "states": "cpu"}].'
            raise _RuleError("placement", "is no longer a list of words, but of rules by name", value, remedy)
        if value == "fraction":
            remedy = f"Change it: {_RETIRED['gpu_fraction']}"
            raise _RuleError("placement", 'is no longer "fraction"', value, remedy)
        return PlacementRules.from_json(value) if isinstance(value, list | Mapping) else value

    @model_validator(mode="after")
    def _check_keys_that_depend_on_placement(self) -> Config:
        for key, is_refused, placement in (
            ("update_stride", self.placement != "stride", '"placement": "stride"'),
            ("num_slots", self.may_plan, 'a "placement" that leaves nothing to the planner, as rules with a last "*"'),
            ("gpu_memory_gb", not self.may_plan, 'a "placement" that leaves something to the planner'),
        ):
            if is_refused and (value := getattr(self, key)) is not None:
                raise _RuleError(key, f"belongs to {placement}", value, 'Remove it, or change "placement".')
        if self.placement == "stride" and self.update_stride is None:
            remedy = 'Add it, for example "update_stride": 2.'
            raise _RuleError("update_stride", 'is required by "placement": "stride"', "nothing", remedy)
        return self

    @property
    def rules(self) -> PlacementRules:
        """Return the rules by name; without rules if ``placement`` is something else."""
        return self.placement if isinstance(self.placement, PlacementRules) else NO_RULES

    @property
    def may_plan(self) -> bool:
        """Return whether the planner would decide for some model, if not for this one."""
        return self.placement == "planned" or (isinstance(self.placement, PlacementRules) and self.placement.may_plan)

    def plans(self, workload: Workload) -> bool:
        """Return whether the planner decides the placement of a unit of ``workload``."""
        return self.placement == "planned" or (self.may_plan and any(unit.fixed is None for unit in workload.units))

    def predicts(self, workload: Workload) -> bool:
        """Return whether a hardware profile is needed, to plan or to compare predictions with measurements."""
        return self.plans(workload) or self.profile is not None or self.report is not None

    def check_names(
        self, trained: Sequence[str], frozen: Collection[str] = (), aliases: Mapping[str, str] | None = None
    ) -> None:
        """Raise ``ConfigError`` if a rule by name has no effect (``PlacementRules.check``)."""
        try:
            self.rules.check(trained, frozen, aliases)
        except RulesError as error:
            raise ConfigError(f"{CONFIG_KEY}.{error}") from None

    def workload(self, sub_groups: Sequence[Sequence[Partition]], unit_size: int | None = None) -> Workload:
        """Return the units of ``sub_groups``, of ``unit_size`` parameters at most unless the config sets it."""
        unit_size = self.unit_size or unit_size or DEFAULT_UNIT_SIZE
        return cut_into_units(sub_groups, unit_size, self.rules.placement_of, self.disk_unit_size)

    @property
    def disk_unit_size(self) -> int:
        """Return the most parameters of a unit on disk."""
        return self.unit_size or DISK_UNIT_SIZE

    def plan(self, workload: Workload, setup: TrainingSetup = DEFAULT_SETUP) -> UpdatePlan:
        """Return the plan for ``workload`` that the config defines. The planner must have nothing to decide."""
        assert not self.plans(workload)
        if self.rules.rules:
            placements = tuple(unit.fixed for unit in workload.units if unit.fixed is not None)
        elif self.update_stride is not None:
            placements = place_by_stride(workload, self.update_stride)
        else:
            placements = place_all(workload, Placement(self.placement))
        plan = UpdatePlan(workload=workload, placements=placements, num_slots=self.num_slots or DEFAULT_NUM_SLOTS)
        return replace(plan, eager=setup.eligible_as_eager(plan)) if self.all_eager else plan

    @property
    def plans_eager(self) -> bool:
        return self.eager == "planned" and self.overlap_backward

    @property
    def all_eager(self) -> bool:
        """Return whether all units that may be eager are."""
        return self.eager is True and self.overlap_backward


def parse_config(ds_config: Mapping[str, Any]) -> Config | None:
    """Return the block of a DeepSpeed config, or None if it has none. Raise ``ConfigError`` if the block is invalid."""
    if CONFIG_KEY not in ds_config:
        return None
    block = ds_config[CONFIG_KEY]
    if not isinstance(block, Mapping):
        raise ConfigError(
            f"{CONFIG_KEY}: must be an object, found {shorten(block)}.\n"
            f'The shortest block that enables the plugin is "{CONFIG_KEY}": {{}}.'
        )
    try:
        return Config.model_validate(dict(block))
    except ValidationError as error:
        raise ConfigError("\n".join(_messages(error))) from None


def enabled_config(ds_config: Mapping[str, Any]) -> Config | None:
    """Return our block of a DeepSpeed config if the plugin is on. Raise ``ConfigError`` for any invalid block."""
    config = parse_config(ds_config)
    if config is None or not config.enabled:
        return None
    if os.environ.get(SWITCH) == "0":
        log.info_once(f"switched off by {SWITCH}=0: training with stock DeepSpeed")
        return None
    return config


def misplaced_error(found: IgnoredBlock | None) -> ConfigError:
    """Return the error for our block ``found`` below the top level of a config, or None in Accelerate's YAML file."""
    rule = f"{CONFIG_KEY}: must be at the top level of the DeepSpeed config"
    place = f'next to "zero_optimization": {{"zero_optimization": {{"stage": 3, ...}}, "{CONFIG_KEY}": {{...}}}}'
    if found is None:
        return ConfigError(
            f'{rule}, found in "deepspeed_config" of Accelerate\'s YAML file, whose other keys Accelerate ignores.\n'
            f"Write it into a DeepSpeed config in JSON, {place}, and name that file there: deepspeed_config_file."
        )
    outer = printable(".".join(map(str, found.path[:-1])), MAX_KEYS)
    whole = f'"{outer}" contains the whole config: give DeepSpeed that dictionary itself.'
    remedy = whole if "zero_optimization" in found.neighbours else f"Move it out, {place}."
    return ConfigError(f'{rule}, found inside "{outer}".\n{remedy}')


_CHOICES = {name: f'"{name}"' for name in ("planned", "cpu", "streamed", "stride")}
_CHOICES["resident"] = '[{"match": "*", "states": "resident"}]'


def _message(key: str, rule: str, found: object, remedy: str) -> str:
    shown = found if found == "nothing" else shorten(found)
    return f"{CONFIG_KEY}.{printable(key, MAX_KEYS)}: {rule}, found {shown}.\n{remedy}"


def _invalid(key: str, rule: str, found: object) -> str:
    first_sentence, *_ = " ".join(str(Config.model_fields[key].description).split()).split(". ")
    remedy = f"Leave it out for the default, or correct it: {first_sentence.replace('`', '').rstrip('.')}."
    if key == "placement":
        rule = 'must be "planned", "cpu", "streamed", "stride" or a list of rules by name'
        remedy = f"{did_you_mean(found, _CHOICES)} {remedy}".strip()
    elif key == "eager":
        rule = 'must be "planned", true or false'
    elif key in ("profile", "report", "nvme_paths"):
        rule = "must be a list of paths" if key == "nvme_paths" else "must be a path"
    return _message(key, rule, found, remedy)


def _messages(error: ValidationError) -> list[str]:
    by_key: dict[str, str] = {}
    for item in error.errors():
        cause, found = item.get("ctx", {}).get("error"), item["input"]
        key = cause.key if isinstance(cause, _RuleError) else str(item["loc"][0])
        if key in by_key:
            # Pydantic reports an error for each member of a union.
            continue
        if isinstance(cause, _RuleError):
            by_key[key] = cause.message
        elif isinstance(cause, RulesError):
            by_key[key] = f"{CONFIG_KEY}.{cause}"
        elif key in _RETIRED:
            by_key[key] = _message(key, "is no longer a key", found, f"Remove the key: {_RETIRED[key]}")
        elif key not in Config.model_fields:
            close = difflib.get_close_matches(key, Config.model_fields, n=1)
            remedy = f'Did you mean "{close[0]}"?' if close else f"Known keys: {', '.join(Config.model_fields)}."
            by_key[key] = _message(key, "is not a known key", found, remedy)
        else:
            by_key[key] = _invalid(key, item["msg"].replace("Input should", "must"), found)
    messages = list(by_key.values())
    if len(messages) > MAX_MESSAGES:
        left_out = len(messages) - MAX_MESSAGES
        messages[MAX_MESSAGES:] = [f"{CONFIG_KEY}: {left_out} more keys are invalid, which are left out here."]
    return messages
