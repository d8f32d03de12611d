"""Parse and validate the ``deep_optimizer_states`` block of the DeepSpeed JSON config."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

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
from pydantic_core import InitErrorDetails, PydanticCustomError

from deep_opt_states.names import CONFIG_KEY, IgnoredBlock, is_about_our_block
from perf_model.json_input import printable, shorten
from perf_model.prediction.memory import GPU_MARGIN_BYTES
from perf_model.schedule.cutting import cut_into_units
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import DEFAULT_NUM_SLOTS, UpdatePlan
from perf_model.schedule.rules import NO_RULES, PlacementRules, RulesError
from perf_model.schedule.simple_placements import place_all, place_by_fraction, place_by_stride
from perf_model.schedule.spellings import did_you_mean
from perf_model.schedule.workload import Partition, Workload
from perf_model.units import GB

DEFAULT_UNIT_SIZE = 50_000_000
"""The most parameters of a unit where neither the config nor the planner chooses."""

MAX_MESSAGES = 5
"""The most invalid keys in one error."""

MAX_KEY = 40
"""The most characters of a key in an error."""

MAX_PLACE = 200
"""The most characters of the keys that lead to a block in an error."""


class ConfigError(ValueError):
    """The error for an invalid block.

    Its message has two lines per invalid key: the dotted key with the rule and the value found, and the remedy.
    """


class Config(BaseModel):
    """The ``deep_optimizer_states`` block of the DeepSpeed config.

    The docstrings of the fields are their pydantic descriptions, from which the table in the documentation is made.
    """

    # Strict: "2" is no integer and 1 is no boolean, so a typo is refused instead of being interpreted.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    enabled: bool = True
    """Whether the plugin is active. With `false`, stock DeepSpeed trains."""

    placement: (
        Literal["planned", "cpu", "streamed", "stride", "fraction"]
        | list[Literal["cpu", "streamed", "resident"]]
        | Annotated[
            InstanceOf[PlacementRules],
            WithJsonSchema({"type": "array", "items": {"type": "object"}}),
        ]
    ) = "planned"
    """Where the optimizer states are kept and updated, by unit: a part of one sub-group, cut along layers where
    possible. `"planned"` chooses the placements for which the performance model predicts the shortest exposed update
    time on this machine. `"cpu"` updates all units on the CPU. `"streamed"` keeps all states in host memory, copies
    each unit to the accelerator, updates it there and copies it back. `"stride"` streams every k-th unit, where
    `update_stride` is k, and updates the others on the CPU. `"fraction"` streams the share of the parameters that
    `gpu_fraction` sets, and updates the others on the CPU. A list of strings has `"cpu"`, `"streamed"` or `"resident"`
    for all units of each sub-group, in the order of the sub-groups; the states of a resident unit stay in the memory of
    the accelerator. A list of objects places parameters by name: see [Rules by name](#rules-by-name)."""

    unit_size: int | None = Field(default=None, ge=1)
    """The most parameters of a unit on each rank, rounded up to a multiple of 256. By default, the planner chooses it;
    a placement that leaves nothing to the planner has units of at most 50,000,000 parameters. DeepSpeed's sub-groups
    and checkpoints do not depend on it."""

    profile: str | None = Field(default=None, min_length=1)
    """The path of a hardware profile from which the plugin plans and predicts; `deep-opt-states profile` writes one. By
    default, the plugin measures a quick profile at start, which takes seconds once DeepSpeed's kernels are compiled,
    and caches it in `~/.cache/deep_opt_states` for this hardware and software. A profile is needed for
    `"placement": "planned"`, for rules by name if a parameter is planned, and for `report`. With the other placements,
    a profile adds predictions to the reports."""

    update_stride: int | None = Field(default=None, ge=2)
    """The stride k of `"placement": "stride"`, the rule of the paper: unit i, counted from 0, is streamed if i + 1 is a
    multiple of k. This placement requires the key, and any other placement refuses it."""

    gpu_fraction: float | None = Field(default=None, ge=0.0, le=1.0)
    """The share of the parameters that `"placement": "fraction"` streams, spread evenly over the units.
    This placement requires the key, and any other placement refuses it."""

    num_slots: int | None = Field(default=None, ge=1)
    """The number of staging slots on the accelerator, through which streamed units pass. Each slot has the size of the
    largest streamed unit, at 12 bytes per parameter. With 2 slots, transfers overlap with
    updates; with more, more states are prefetched during one backward, and more flushes overlap with the next. Defaults
    to 2. The number never changes in training: the slots must fit in addition to all that training needs. `"placement":
    "planned"`, and rules by name that leave something to the planner, refuse the key, because the planner chooses the
    number."""

    cpu_threads: int | None = Field(default=None, ge=1)
    """The number of threads with which each rank updates on the CPU. By default one per physical core of the rank's
    share of its node; on a GPU, less the cores that launch its kernels ([CPU cores](cpu_cores.md)). The number does not
    depend on `OMP_NUM_THREADS`."""

    bind_cores: bool = True
    """Whether to pin the threads of the CPU update to cores of their own, near the rank's GPU, and to keep all other
    threads of the process off these cores. On the CPU accelerator nothing is pinned."""

    gpu_memory_gb: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    """The memory of each GPU that the planner may use for staging slots and resident states, in GB (10^9 bytes), in
    addition to the three staging buffers for gradients. By default nothing at start, because the need of the
    activations is not known, and after the first steps all memory that was free at their peak, less
    `gpu_memory_margin_gb`. A number is a limit from the start on, and the planner does not use more later. In both
    cases it uses less when memory becomes short. A placement that leaves nothing to the planner refuses the key.
    Gradients are accumulated over micro-batches on the GPU if they fit within this limit together with the slots and
    the resident states. No effect on the CPU accelerator, which has no memory of its own."""

    gpu_memory_margin_gb: float = Field(default=GPU_MARGIN_BYTES / GB, ge=0.0, allow_inf_nan=False)
    """The memory of each GPU that stays free when the planner uses what was free in the first steps, in GB (10^9
    bytes). When half of it is taken, memory counts as short: all states are evicted, and the planner plans once more
    with what is left, so that the margin is free again. The log reports each change."""

    overlap_backward: bool = True
    """Whether to prefetch the states of streamed units into free staging slots during backward."""

    overlap_forward: bool = True
    """Whether the update overlaps with the next forward. `step()` then returns when the gradient norm is known and the
    parameters that DeepSpeed keeps gathered are updated. All other units are updated while forward runs, before it uses
    their parameters. No effect with `wall_clock_breakdown` or `flops_profiler`, or on a GPU if
    `timers.throughput.synchronized` is `true`. If the config does not set that key, the throughput timer uses the
    host's clock and does not synchronize the device."""

    report: str | None = Field(default=None, min_length=1)
    """The path of a folder into which rank 0 writes its measurements, for `deep-opt-states report`. By default, nothing
    is written. How often the log has a line is set by `steps_per_print` of the DeepSpeed config, outside this block."""

    @model_validator(mode="after")
    def _check_keys_that_depend_on_placement(self) -> Config:
        for placement, key, value in (
            ("stride", "update_stride", self.update_stride),
            ("fraction", "gpu_fraction", self.gpu_fraction),
        ):
            if self.placement == placement and value is None:
                remedy = f'Add it, for example "{key}": {_RULES[key].example}.'
                raise _RuleError(key, f'is required by "placement": "{placement}"', "nothing", remedy)
            if self.placement != placement and value is not None:
                remedy = f'Remove it, or set "placement": "{placement}".'
                raise _RuleError(key, f'belongs to "placement": "{placement}"', value, remedy)
        if self.placement == "planned" or any(rule.placement is None for rule in self.rules.rules):
            self._refuse_num_slots()
        if not self.may_plan and self.gpu_memory_gb is not None:
            rule = 'belongs to a "placement" that leaves something to the planner'
            remedy = 'Remove it: the memory of this "placement" follows from the placement and "num_slots".'
            raise _RuleError("gpu_memory_gb", rule, self.gpu_memory_gb, remedy)
        return self

    def _refuse_num_slots(self) -> None:
        if self.num_slots is not None:
            rule = 'is chosen by the planner, to which "placement" leaves all or some parameters'
            remedy = 'Remove it, or set a "placement" that leaves nothing to the planner.'
            raise _RuleError("num_slots", rule, self.num_slots, remedy)

    @field_validator("placement", mode="before")
    @classmethod
    def _parse_rules(cls, value: object) -> object:
        """Return rules if ``value`` is an object or a list with an object in it, and else ``value``."""
        value = list(value) if isinstance(value, tuple) else value
        is_list = isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value)
        return PlacementRules.from_json(value) if is_list or isinstance(value, Mapping) else value

    @property
    def rules(self) -> PlacementRules:
        """Return the rules by name; without rules if ``placement`` is something else."""
        return self.placement if isinstance(self.placement, PlacementRules) else NO_RULES

    @property
    def may_plan(self) -> bool:
        """Return whether the planner would decide, if not for this model, then for one with other names."""
        return self.placement == "planned" or (isinstance(self.placement, PlacementRules) and self.placement.may_plan)

    def plans(self, workload: Workload) -> bool:
        """Return whether the planner decides the placement of a unit of ``workload``."""
        return self.placement == "planned" or (self.may_plan and any(unit.fixed is None for unit in workload.units))

    def predicts(self, workload: Workload) -> bool:
        """Return whether a hardware profile is needed, to plan or to compare predictions with measurements."""
        return self.plans(workload) or self.profile is not None or self.report is not None

    def check_names(
        self,
        trained: Sequence[str],
        frozen: Collection[str] = (),
        aliases: Mapping[str, str] | None = None,
        *,
        may_train_fewer: bool = False,
    ) -> None:
        """Raise ``ConfigError`` if a rule by name has no effect, or if a key does not suit what the rules leave.

        The other arguments are those of ``PlacementRules.check``. ``may_train_fewer``: the optimizer may have only some
        of ``trained``, so it is not known yet whether the rules leave any.
        """
        try:
            self.rules.check(trained, frozen, aliases)
            is_known = bool(self.rules.rules) and not may_train_fewer
            if is_known and any(self.rules.placement_of(name) is None for name in trained):
                self._refuse_num_slots()
        except RulesError as error:
            raise ConfigError(f"{CONFIG_KEY}.{error}") from None
        except _RuleError as error:
            raise ConfigError(error.message) from None

    def workload(self, sub_groups: Sequence[Sequence[Partition]], unit_size: int | None = None) -> Workload:
        """Return the units of ``sub_groups``, fixed where a rule by name is for their parameters.

        ``unit_size`` is a choice of the planner, which ``unit_size`` of the config overrides.
        """
        return cut_into_units(sub_groups, self.unit_size or unit_size or DEFAULT_UNIT_SIZE, self.rules.placement_of)

    def plan(self, workload: Workload) -> UpdatePlan:
        """Return the plan for ``workload`` that the config defines. The planner must have nothing to decide.

        Raise ``ConfigError`` if a list does not have one entry per sub-group.
        """
        assert not self.plans(workload)
        return UpdatePlan(
            workload=workload, placements=self._placements(workload), num_slots=self.num_slots or DEFAULT_NUM_SLOTS
        )

    def _placements(self, workload: Workload) -> tuple[Placement, ...]:
        match self.placement:
            case PlacementRules():
                return tuple(unit.fixed for unit in workload.units if unit.fixed is not None)
            case list(entries):
                count = len(workload.sub_group_numels)
                if len(entries) != count:
                    raise ConfigError(
                        f"{CONFIG_KEY}.placement: an explicit list must have one entry per sub-group; this model has "
                        f"{count} sub-groups, found {len(entries)} entries.\n"
                        f'Change the list, or "sub_group_size" in "zero_optimization", or name a rule '
                        f'such as "placement": "stride".'
                    )
                placements = [Placement(entries[unit.ranges[0].sub_group]) for unit in workload.units]
                return tuple(
                    Placement.CPU if unit.is_persistent else placement
                    for unit, placement in zip(workload.units, placements, strict=True)
                )
            case "stride":
                assert self.update_stride is not None
                return place_by_stride(workload, self.update_stride)
            case "fraction":
                assert self.gpu_fraction is not None
                return place_by_fraction(workload, self.gpu_fraction)
            case _:
                return place_all(workload, Placement(self.placement))


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


def explain_misplaced(error: Any) -> ValidationError:
    """Return ``error``, a ``ValidationError`` of DeepSpeed about our block inside another block, with a remedy added.

    The new error has the same type and the same lines, so that code that handles DeepSpeed's error still works.
    """
    lines: list[InitErrorDetails] = []
    for line in error.errors(include_url=False):
        kind: str | PydanticCustomError = line["type"]
        if is_about_our_block(line["loc"]):
            kind = PydanticCustomError("extra_forbidden", _MISPLACED)
        lines.append({"type": kind, "loc": line["loc"], "input": line["input"], "ctx": line.get("ctx", {})})
    return ValidationError.from_exception_data(error.title, lines)


def misplaced_error(found: IgnoredBlock | None) -> ConfigError:
    """Return the error for our block ``found`` below the top level of a config, or None in Accelerate's YAML file."""
    rule = f"{CONFIG_KEY}: must be at the top level of the DeepSpeed config"
    if found is None:
        return ConfigError(
            f'{rule}, found in "deepspeed_config" of Accelerate\'s YAML file, whose other keys Accelerate ignores.\n'
            f"Write it into a DeepSpeed config in JSON, {_PLACE}, and name that file there: deepspeed_config_file."
        )
    outer = printable(".".join(map(str, found.path[:-1])), MAX_PLACE)
    remedy = f"Move it out, {_PLACE}."
    if "zero_optimization" in found.neighbours:
        remedy = f'"{outer}" contains the whole config: give DeepSpeed that dictionary itself.'
    return ConfigError(f'{rule}, found inside "{outer}".\n{remedy}')


_PLACE = f'next to "zero_optimization": {{"zero_optimization": {{"stage": 3, ...}}, "{CONFIG_KEY}": {{...}}}}'
_MISPLACED = (
    f'"{CONFIG_KEY}" must be at the top level of the DeepSpeed config, found inside another block. '
    f"Move it out, {_PLACE}"
)


class _RuleError(ValueError):
    """The error for a broken rule that involves several keys."""

    def __init__(self, key: str, rule: str, found: object, remedy: str) -> None:
        super().__init__(rule)
        self.key = key
        self.message = _message(key, rule, found, remedy)


class _KeyRule(NamedTuple):
    """The rule for one key, as an error message states it."""

    rule: str
    remedy: str
    example: str = ""


_RULES = {
    "enabled": _KeyRule("must be true or false", "Leave it out to enable the plugin."),
    "placement": _KeyRule(
        'must be "planned", "cpu", "streamed", "stride", "fraction", '
        'a list with "cpu", "streamed" or "resident" for each sub-group, or a list of rules by name',
        "Leave it out for the placement that is predicted to be fastest on this machine.",
    ),
    "unit_size": _KeyRule(
        "must be an integer of at least 1",
        "It is the most parameters of a unit on each rank; leave it out for the size that the planner chooses.",
    ),
    "profile": _KeyRule(
        "must be a path",
        "Write a profile with: deep-opt-states profile --output profile.json. Without it, a quick profile is measured.",
    ),
    "update_stride": _KeyRule(
        "must be an integer of at least 2",
        'Every k-th unit is updated on the GPU; for all of them, use "placement": "streamed".',
        example="2",
    ),
    "gpu_fraction": _KeyRule(
        "must be a number from 0 to 1",
        "It is the share of the parameters that is updated on the GPU.",
        example="0.5",
    ),
    "num_slots": _KeyRule(
        "must be an integer of at least 1",
        "It is the number of staging slots on the GPU for streamed units; leave it out for as many as fit.",
    ),
    "cpu_threads": _KeyRule(
        "must be an integer of at least 1",
        "It is the number of update threads per rank; leave it out for as many as the rank's share of cores allows.",
    ),
    "bind_cores": _KeyRule(
        "must be true or false",
        "Leave it out to pin the update's threads and all other threads to separate cores.",
    ),
    "gpu_memory_gb": _KeyRule(
        "must be a number of at least 0",
        "It is the memory of each GPU, in GB, that the optimizer may use; leave it out to use what stays free.",
    ),
    "gpu_memory_margin_gb": _KeyRule(
        "must be a number of at least 0",
        "It is the memory of each GPU, in GB, that the planner leaves free of what was free in the first steps.",
    ),
    "overlap_backward": _KeyRule(
        "must be true or false", "Leave it out to prefetch the states of streamed units during backward."
    ),
    "overlap_forward": _KeyRule(
        "must be true or false",
        "Leave it out to overlap the update with the next forward, until forward needs the updated parameters.",
    ),
    "report": _KeyRule(
        "must be a path",
        "Rank 0 writes its measurements into that folder, for: deep-opt-states report FOLDER. To set how often the log "
        'has a line, use "steps_per_print" in the DeepSpeed config, outside this block.',
    ),
}


_RETIRED = {
    "untested_deepspeed": (
        "Remove the key: a release of DeepSpeed that was not tested gives a warning, and is refused if it lacks a name "
        "that the plugin uses. To exclude such releases, pin DeepSpeed in your environment."
    ),
    "split_masters": (
        "Remove the key: master weights are always fp32, with the same results. To need less host memory, 6 bytes per "
        "parameter instead of 16, a later release will use DeepSpeed's bf16 optimizer states."
    ),
}
"""The remedy for each key of an earlier release that is refused, whatever its value is."""


def _message(key: str, rule: str, found: object, remedy: str) -> str:
    shown = found if found == "nothing" else shorten(found)
    return f"{CONFIG_KEY}.{printable(key, MAX_KEY)}: {rule}, found {shown}.\n{remedy}"


_CHOICES = {name: f'"{name}"' for name in ("planned", "cpu", "streamed", "stride", "fraction")}
# No text stands for this placement of all units.
_CHOICES["resident"] = '[{"match": "*", "states": "resident"}]'
_CHOICES_IN_LIST = {name: f'"{name}"' for name in ("cpu", "streamed", "resident")}


def _remedy(key: str, found: object) -> str:
    """Return the remedy for an invalid value of a key, with the placement that another word for one stands for."""
    choices, words = _CHOICES, [found]
    if isinstance(found, list):
        choices, words = _CHOICES_IN_LIST, found
    wrong = (word for word in words if isinstance(word, str) and choices.get(word) != f'"{word}"')
    questions = (did_you_mean(word, choices) for word in wrong if key == "placement")
    return f"{next(filter(None, questions), '')} {_RULES[key].remedy}".strip()


def _messages(error: ValidationError) -> list[str]:
    """Return one message per invalid key, with the rule, the value found and the remedy."""
    by_key: dict[str, str] = {}
    for item in error.errors():
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, _RuleError):
            by_key.setdefault(cause.key, cause.message)
            continue
        if isinstance(cause, RulesError):
            by_key.setdefault("placement", f"{CONFIG_KEY}.{cause}")
            continue
        key = str(item["loc"][0])
        if key in _RETIRED:
            by_key.setdefault(key, _message(key, "is no longer a key", item["input"], _RETIRED[key]))
        elif item["type"] == "extra_forbidden":
            known = Config.model_fields
            close = difflib.get_close_matches(key, known, n=1)
            remedy = f'Did you mean "{close[0]}"?' if close else f"Known keys: {', '.join(known)}."
            by_key.setdefault(key, _message(key, "is not a known key", item["input"], remedy))
        else:
            # Pydantic reports an error for each member of a union; one message per key is enough.
            by_key.setdefault(key, _message(key, _RULES[key].rule, item["input"], _remedy(key, item["input"])))
    messages = list(by_key.values())
    if len(messages) > MAX_MESSAGES:
        left_out = len(messages) - MAX_MESSAGES
        messages[MAX_MESSAGES:] = [f"{CONFIG_KEY}: {left_out} more keys are invalid, which are left out here."]
    return messages
