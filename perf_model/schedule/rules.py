"""Define rules that place parameters by name: ``"placement": [{"match": "*.experts.*", "states": "cpu"}]``.

The first rule that matches a name counts. A rule without effect is an error, because it is most often a misspelt name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from perf_model.json_input import printable, shorten
from perf_model.schedule.cutting import layer_of
from perf_model.schedule.placement import Placement

States = Literal["cpu", "streamed", "resident", "planned"]
"""A placement, or ``"planned"`` to let the planner choose."""

_KEYS = ("match", "states")
_ON_ACCELERATOR = ("gpu", "cuda", "device", "accelerator", "vram", "hbm")
_OTHER_WORDS = {"cpu": ("host", "ram", "offload", "pinned"), "planned": ("auto", "default", "fastest", "best")}
EXAMPLE = '{"match": "lm_head.*", "states": "resident"}'
_FOR_EXAMPLE = f"For example: {EXAMPLE}."


class RulesError(ValueError):
    """The error for rules that are invalid or without effect: key, rule, value and remedy."""

    def __init__(self, key: str, rule: str, found: str, remedy: str) -> None:
        super().__init__(f"placement{key}: {rule}, found {found}.\n{remedy}")


@dataclass(frozen=True)
class PlacementRule:
    """The placement of the parameters that match one of ``match``, case-sensitive patterns of ``fnmatch``."""

    match: tuple[str, ...]
    states: States

    @property
    def placement(self) -> Placement | None:
        """Return the placement; None if the planner decides."""
        return None if self.states == "planned" else Placement(self.states)

    def matches(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.match)

    def __str__(self) -> str:
        return "rule " + " or ".join(map(repr, self.match))


@dataclass(frozen=True)
class PlacementRules:
    rules: tuple[PlacementRule, ...] = ()

    @classmethod
    def from_json(cls, value: object) -> PlacementRules:
        """Return the rules in a list of JSON objects. Raise ``RulesError`` if one is invalid."""
        if not isinstance(value, list) or not value:
            raise RulesError("", "must be a list of rules", shorten(value), f"Give a list of objects. {_FOR_EXAMPLE}")
        return cls(tuple(_parse(f"[{number}]", rule) for number, rule in enumerate(value)))

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {"match": rule.match[0] if len(rule.match) == 1 else list(rule.match), "states": rule.states}
            for rule in self.rules
        ]

    @property
    def may_plan(self) -> bool:
        """Return whether the planner chooses a placement in this model or in one with other names."""
        return any(rule.placement is None for rule in self.rules) or not any("*" in rule.match for rule in self.rules)

    def rule_for(self, name: str) -> PlacementRule | None:
        return next((rule for rule in self.rules if rule.matches(name)), None)

    def placement_of(self, name: str) -> Placement | None:
        rule = self.rule_for(name)
        return None if rule is None else rule.placement

    def check(
        self, trained: Sequence[str], frozen: Collection[str] = (), aliases: Mapping[str, str] | None = None
    ) -> None:
        """Raise ``RulesError`` if a rule has no effect on a model with these names of parameters.

        ``aliases`` maps each further name of a tied parameter to its first name.
        """
        for number, rule in enumerate(self.rules):
            key, found = f"[{number}].match", ", ".join(map(repr, rule.match))
            for pattern in rule.match:
                if not any(fnmatchcase(name, pattern) for name in [*trained, *frozen]):
                    raise _matches_nothing(key, pattern, [*trained, *frozen], aliases or {})
            takers = dict.fromkeys(self.rule_for(name) for name in trained if rule.matches(name))
            if not takers:
                remedy = "Frozen parameters have no optimizer states. Remove the rule."
                found += ", which matches only frozen parameters"
                raise RulesError(key, "must match a parameter that is trained", found, remedy)
            if not any(taker is rule for taker in takers):
                found += f", whose parameters are all taken by {' and '.join(map(str, takers))}"
                remedy = "The first rule that matches counts. Put this rule before it, or remove one of them."
                raise RulesError(key, "must match a parameter that no earlier rule matches", found, remedy)


NO_RULES = PlacementRules()


def _parse(key: str, rule: object) -> PlacementRule:
    if not isinstance(rule, Mapping):
        raise RulesError(key, "must be an object if another entry is one", shorten(rule), _FOR_EXAMPLE)
    for unknown in rule.keys() - set(_KEYS):
        remedy = did_you_mean(unknown, {name: f'"{name}"' for name in _KEYS}) or "A rule has the keys match and states."
        shown = f"{key}.{printable(unknown, 100)}"
        raise RulesError(shown, "is not a known key of a rule", shorten(rule[unknown]), remedy)
    for required in _KEYS:
        if required not in rule:
            raise RulesError(f"{key}.{required}", "is required", "nothing", _FOR_EXAMPLE)
    match, states = rule["match"], rule["states"]
    patterns = match if isinstance(match, list) else [match]
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        remedy = 'It matches full names of parameters; * stands for any text. For example: "match": "*.mlp.experts.*".'
        raise RulesError(f"{key}.match", "must be a pattern or a list of patterns", shorten(match), remedy)
    if states not in get_args(States):
        remedy = did_you_mean(states, {choice: f'"{choice}"' for choice in get_args(States)})
        remedy = remedy or 'With "planned", the planner chooses.'
        raise RulesError(f"{key}.states", 'must be "cpu", "streamed", "resident" or "planned"', shorten(states), remedy)
    return PlacementRule(tuple(patterns), states)


def _matches_nothing(key: str, pattern: str, names: Sequence[str], aliases: Mapping[str, str]) -> RulesError:
    for alias, first in aliases.items():
        if fnmatchcase(alias, pattern):
            found = f'{pattern!r}, which matches "{alias}", another name of "{first}"'
            remedy = f'A tied parameter has one name, the first. Match "{first}".'
            return RulesError(key, "must match a parameter by the name that counts", found, remedy)
    nearest = ", ".join(nearest_names(pattern, names))
    remedy = f"The nearest names: {nearest}. Patterns are as in a shell, for whole names: * stands for any text."
    return RulesError(key, "must match a parameter of the model", repr(pattern), remedy)


def did_you_mean(word: object, choices: Mapping[str, str]) -> str:
    """Return a question that names the choice most like ``word``, by its text in ``choices``, or an empty text."""
    letters = str(word).lower()
    meant = [choice for choice in choices if choice in letters]
    if not meant and "resident" in choices and any(other in letters for other in _ON_ACCELERATOR):
        return (
            f"Did you mean {choices['resident']}, which keeps the states on the GPU, or {choices['streamed']}, which "
            f"keeps them in host memory and copies them to the GPU for each update?"
        )
    others = (choice for choice, words in _OTHER_WORDS.items() if any(other in letters for other in words))
    meant = meant or [choice for choice in others if choice in choices]
    meant = meant or get_close_matches(letters, choices, n=1)
    return f"Did you mean {choices[meant[0]]}?" if meant else ""


def nearest_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Return three names of parameters and layers that share most letters with ``pattern``, in runs of three or more.

    The shortest come first among equal ones. Names that differ only in numbers count once.
    """
    candidates: dict[str, str] = {}
    for name in names:
        for text in (name, layer_of(name)):
            candidates.setdefault(re.sub(r"\d+", "0", text), text)
    # A regular expression is meant as well: *, \. and .* are no letters of a name.
    spelled = re.sub(r"[*?\[\]!^$\\+]+", "", pattern).strip(".")

    def distance(name: str) -> tuple[int, float]:
        matcher = SequenceMatcher(None, spelled, name, autojunk=False)
        common = sum(block.size for block in matcher.get_matching_blocks() if block.size >= 3)
        return -common, -matcher.ratio()

    return sorted(candidates.values(), key=distance)[:3]
