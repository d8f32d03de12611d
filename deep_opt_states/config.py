"""The validated ``deep_optimizer_states`` block of the DeepSpeed JSON config."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from deep_opt_states.names import CONFIG_KEY, is_about_our_block
from perf_model.schedule.placement import Placement, place_all, place_by_fraction, place_by_stride
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload


class ConfigError(ValueError):
    """The block is invalid; every line of the message starts with a dotted key."""


class Config(BaseModel):
    # Strict: "2" is no integer and 1 is no boolean, so a typo is refused instead of being interpreted.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    enabled: bool = True
    placement: (
        Literal["planned", "cpu", "streamed", "stride", "fraction"] | list[Literal["cpu", "streamed", "resident"]]
    ) = "planned"
    profile: str | None = Field(default=None, min_length=1)
    update_stride: int | None = Field(default=None, ge=2)
    gpu_fraction: float | None = Field(default=None, ge=0.0, le=1.0)
    num_slots: int = Field(default=2, ge=1)
    cpu_threads: int | None = Field(default=None, ge=1)
    bind_cores: bool = True
    gpu_memory_gb: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    gpu_memory_margin_gb: float = Field(default=2.0, ge=0.0, allow_inf_nan=False)
    overlap_backward: bool = True
    overlap_forward: bool = True
    report: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _each_rule_has_its_number(self) -> Config:
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
        if self.placement == "planned" and "num_slots" in self.model_fields_set:
            remedy = 'Remove it, or set another "placement".'
            raise _RuleError("num_slots", 'is chosen by "placement": "planned"', self.num_slots, remedy)
        if self.placement != "planned" and self.gpu_memory_gb is not None:
            remedy = 'Remove it: what another "placement" takes follows from it and "num_slots".'
            raise _RuleError("gpu_memory_gb", 'belongs to "placement": "planned"', self.gpu_memory_gb, remedy)
        return self

    @property
    def predicts(self) -> bool:
        """Whether a hardware profile is needed: to plan, or to compare what is predicted with what is measured."""
        return self.placement == "planned" or self.profile is not None or self.report is not None

    def plan(self, workload: Workload) -> UpdatePlan:
        """The plan that a rule or a list asks for. Raises ``ConfigError`` if a list has not one entry a sub-group.

        ``"planned"`` asks for what is predicted to be best, which this class does not know.
        """
        assert self.placement != "planned"
        if isinstance(self.placement, list):
            if len(self.placement) != len(workload.sub_groups):
                raise ConfigError(
                    f"{CONFIG_KEY}.placement: an explicit list has one entry a sub-group; this model has "
                    f"{len(workload.sub_groups)} sub-groups, found {len(self.placement)} entries.\n"
                    f'Change the list, or "sub_group_size" in "zero_optimization", or name a rule '
                    f'such as "placement": "stride".'
                )
            placements = tuple(map(Placement, self.placement))
        elif self.placement == "stride":
            assert self.update_stride is not None
            placements = place_by_stride(workload, self.update_stride)
        elif self.placement == "fraction":
            assert self.gpu_fraction is not None
            placements = place_by_fraction(workload, self.gpu_fraction)
        else:
            placements = place_all(workload, Placement(self.placement))
        return UpdatePlan(workload=workload, placements=placements, num_slots=self.num_slots)


def parse_config(ds_config: Mapping[str, Any]) -> Config | None:
    """The block in a DeepSpeed config, or None where there is none. Raises ``ConfigError``."""
    if CONFIG_KEY not in ds_config:
        return None
    block = ds_config[CONFIG_KEY]
    if not isinstance(block, Mapping):
        raise ConfigError(
            f"{CONFIG_KEY}: must be an object, found {block!r}.\n"
            f'The least that enables the plugin is "{CONFIG_KEY}": {{}}.'
        )
    try:
        return Config.model_validate(dict(block))
    except ValidationError as error:
        raise ConfigError("\n".join(_messages(error))) from None


def explain_misplaced(error: Any) -> ValidationError:
    """Return DeepSpeed's ``ValidationError`` about our block inside one of DeepSpeed's own, with the remedy added.

    It has the same type and the same lines, so that a caller who handles DeepSpeed's error still does.
    """
    lines: list[InitErrorDetails] = []
    for line in error.errors(include_url=False):
        kind: str | PydanticCustomError = line["type"]
        if is_about_our_block(line["loc"]):
            kind = PydanticCustomError("extra_forbidden", _MISPLACED)
        lines.append({"type": kind, "loc": line["loc"], "input": line["input"], "ctx": line.get("ctx", {})})
    return ValidationError.from_exception_data(error.title, lines)


_MISPLACED = (
    f'"{CONFIG_KEY}" must be at the top level of the DeepSpeed config, found inside another block. '
    f'Move it out, beside "zero_optimization": '
    f'{{"zero_optimization": {{"stage": 3, ...}}, "{CONFIG_KEY}": {{...}}}}'
)


class _RuleError(ValueError):
    """A rule between keys."""

    def __init__(self, key: str, rule: str, found: object, remedy: str) -> None:
        super().__init__(rule)
        self.key = key
        self.message = _message(key, rule, found, remedy)


class _Rule(NamedTuple):
    rule: str
    remedy: str
    example: str = ""


_RULES = {
    "enabled": _Rule("must be true or false", "Leave it out to enable the plugin."),
    "placement": _Rule(
        'must be "planned", "cpu", "streamed", "stride", "fraction", '
        'or a list with "cpu", "streamed" or "resident" for each sub-group',
        "Leave it out for what is predicted to be best on this machine.",
    ),
    "profile": _Rule(
        "must be a path",
        "Write a profile with: deep-opt-states profile --output profile.json; without one a quick one is measured.",
    ),
    "update_stride": _Rule(
        "must be an integer of at least 2",
        'Stride k puts every k-th sub-group on the GPU; for all of them use "placement": "streamed".',
        example="2",
    ),
    "gpu_fraction": _Rule(
        "must be a number from 0 to 1",
        "It is the share of the parameters that is updated on the GPU.",
        example="0.5",
    ),
    "num_slots": _Rule(
        "must be an integer of at least 1",
        "Streamed sub-groups pass through that many staging slots on the GPU; 2 overlap transfers and update.",
    ),
    "cpu_threads": _Rule(
        "must be an integer of at least 1",
        "A rank updates with that many on the CPU; leave it out for one a physical core of the rank's share.",
    ),
    "bind_cores": _Rule(
        "must be true or false", "Leave it out to keep the threads of the update and all others on cores of their own."
    ),
    "gpu_memory_gb": _Rule(
        "must be a number of at least 0",
        "Gigabytes of each GPU that the optimizer may take; leave it out for a tenth of the GPU's memory.",
    ),
    "gpu_memory_margin_gb": _Rule(
        "must be a number of at least 0",
        "Gigabytes of each GPU that stay free when slots are added to prefetch into while backward runs.",
    ),
    "overlap_backward": _Rule(
        "must be true or false", "Leave it out to prefetch streamed sub-groups' states while backward runs."
    ),
    "overlap_forward": _Rule(
        "must be true or false",
        "Leave it out to let the update go on in the next forward, up to where that needs its parameters.",
    ),
    "report": _Rule(
        "must be a path",
        'Rank 0 writes what it measures into that folder, for: deep-opt-states report FOLDER. "steps_per_print" of the '
        "DeepSpeed config, and not of this block, says how often the log has a line.",
    ),
}


def _message(key: str, rule: str, found: object, remedy: str) -> str:
    shown = found if found == "nothing" else repr(found)
    return f"{CONFIG_KEY}.{key}: {rule}, found {shown}.\n{remedy}"


def _messages(error: ValidationError) -> list[str]:
    """One message a key: the rule, the value found, the remedy."""
    by_key: dict[str, str] = {}
    for item in error.errors():
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, _RuleError):
            by_key.setdefault(cause.key, cause.message)
            continue
        key = str(item["loc"][0])
        if item["type"] == "extra_forbidden":
            known = Config.model_fields
            close = difflib.get_close_matches(key, known, n=1)
            remedy = f'Did you mean "{close[0]}"?' if close else f"Known keys: {', '.join(known)}."
            by_key.setdefault(key, _message(key, "is no known key", item["input"], remedy))
        else:
            # A union fails once for each member that the value is not; one message will do.
            by_key.setdefault(key, _message(key, _RULES[key].rule, item["input"], _RULES[key].remedy))
    return list(by_key.values())
