"""Define rules that place parameters by name, as in ``"placement": [{"match": "*.experts.*", "states": "cpu"}]``.

The first rule that matches a parameter's name places the parameter, and the planner decides the rest. A rule without
effect is an error, because it is most often a misspelt name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase, translate
from functools import cached_property
from typing import Any, Literal, get_args

from perf_model.json_input import printable, shorten
from perf_model.schedule.cutting import layer_of
from perf_model.schedule.placement import Placement
from perf_model.schedule.spellings import did_you_mean, rules_as_list, shell_pattern_of

States = Literal["cpu", "streamed", "resident", "planned"]
"""The choices of a rule: a placement, or ``"planned"``, with which the planner chooses it."""

MATCHES_ALL = "*"

NEAREST = 3
"""The number of names that an error suggests."""

COMMON_LETTERS = 3
"""The least number of letters in a row that count as common to a pattern and a name."""

MAX_PATTERNS = 1_000
"""The largest number of rules, and of patterns in a rule: each is compared with the name of every parameter."""

MAX_PATTERN = 1_000
"""The most characters of a pattern."""

_FEWER = "With the pattern *, a rule matches many names at once."
_KEYS = ("match", "states")
_EXAMPLE = '{"match": "lm_head.*", "states": "resident"}'


class RulesError(ValueError):
    """The error for rules that are invalid or have no effect.

    Its message has two lines: the key with the rule and the value found, and the remedy.
    """

    def __init__(self, key: str, rule: str, found: str, remedy: str) -> None:
        super().__init__(f"placement{key}: {rule}, found {found}.\n{remedy}")


@dataclass(frozen=True)
class PlacementRule:
    """The states of the parameters whose names match one of the patterns ``match``.

    Patterns are those of ``fnmatch``, case-sensitive, for the full name in the module.
    """

    match: tuple[str, ...]
    states: States

    @property
    def placement(self) -> Placement | None:
        """Return the placement; None if the planner decides."""
        return None if self.states == "planned" else Placement(self.states)

    @property
    def matches_all(self) -> bool:
        """Return whether a pattern matches every name."""
        return MATCHES_ALL in self.match

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(translate, self.match)))

    def matches(self, name: str) -> bool:
        """Return whether the rule is for the parameter ``name``, unless an earlier rule is."""
        return self._pattern.match(name) is not None

    def __str__(self) -> str:
        return "rule " + " or ".join(map(repr, self.match))


@dataclass(frozen=True)
class PlacementRules:
    """Rules in order: the first that matches a parameter places it, and the planner decides where no rule matches."""

    rules: tuple[PlacementRule, ...] = ()

    @classmethod
    def from_json(cls, value: object) -> PlacementRules:
        """Return the rules that a list of JSON objects defines. Raise ``RulesError`` unless each of them is valid."""
        if not isinstance(value, list) or not value:
            in_list = rules_as_list(value) if isinstance(value, Mapping) else ""
            remedy = f"Put it into a list: {in_list}." if in_list else f"For example: [{_EXAMPLE}]."
            raise RulesError("", "must be a list of rules", shorten(value), remedy)
        if len(value) > MAX_PATTERNS:
            raise RulesError("", f"must have at most {MAX_PATTERNS:,} rules", f"{len(value):,}", _FEWER)
        return cls(tuple(_parse(f"[{number}]", rule) for number, rule in enumerate(value)))

    def to_json(self) -> list[dict[str, Any]]:
        """Return the rules as they are written to JSON."""
        return [
            {"match": rule.match[0] if len(rule.match) == 1 else list(rule.match), "states": rule.states}
            for rule in self.rules
        ]

    @property
    def may_plan(self) -> bool:
        """Return whether there are names whose placement the planner would choose, be they of this model or not."""
        return any(rule.placement is None for rule in self.rules) or not any(rule.matches_all for rule in self.rules)

    def rule_for(self, name: str) -> PlacementRule | None:
        """Return the first rule that matches ``name``, or None."""
        number = self._number_of(name)
        return None if number is None else self.rules[number]

    def placement_of(self, name: str) -> Placement | None:
        """Return the placement of the parameter ``name``; None if the planner decides."""
        rule = self.rule_for(name)
        return None if rule is None else rule.placement

    def _number_of(self, name: str) -> int | None:
        if name not in self._numbers:
            self._numbers[name] = next((number for number, rule in enumerate(self.rules) if rule.matches(name)), None)
        return self._numbers[name]

    @cached_property
    def _numbers(self) -> dict[str, int | None]:
        """Return the results of ``_number_of`` so far: a model has many names, and is cut into units of many sizes."""
        return {}

    def check(
        self, trained: Sequence[str], frozen: Collection[str] = (), aliases: Mapping[str, str] | None = None
    ) -> None:
        """Raise ``RulesError`` if a rule is without effect on a model.

        ``trained`` and ``frozen`` are the names of the model's parameters. ``aliases`` maps each further name of a tied
        parameter to the first one, which is in ``trained`` or ``frozen``.
        """
        for number, rule in enumerate(self.rules):
            key = f"[{number}].match"
            for pattern in rule.match:
                _check_pattern(key, pattern, trained, frozen, aliases or {})
            matched = [name for name in trained if rule.matches(name)]
            if not matched:
                found = f"{', '.join(map(repr, rule.match))}, which matches only frozen parameters"
                remedy = "Frozen parameters have no optimizer states. Remove the rule."
                raise RulesError(key, "must match a parameter that is trained", found, remedy)
            takers = sorted({taker for name in matched if (taker := self._number_of(name)) is not None})
            if number not in takers:
                earlier = " and ".join(f"{self.rules[taker]} (placement[{taker}])" for taker in takers)
                found = (
                    f"{', '.join(map(repr, rule.match))}, whose {len(matched)} parameters are all taken by {earlier}"
                )
                remedy = "The first rule that matches counts. Put this rule before it, or remove one of them."
                raise RulesError(key, "must match a parameter that no earlier rule matches", found, remedy)


NO_RULES = PlacementRules()


def _parse(key: str, rule: object) -> PlacementRule:
    """Return the rule that one JSON object defines. Raise ``RulesError`` unless it is valid."""
    if not isinstance(rule, Mapping):
        raise RulesError(key, "must be an object if another entry is one", shorten(rule), f"For example: {_EXAMPLE}.")
    for unknown in rule.keys() - set(_KEYS):
        spelled = printable(unknown, 100)
        close = difflib.get_close_matches(spelled, _KEYS, n=1)
        remedy = f'Did you mean "{close[0]}"?' if close else f"A rule has the keys {' and '.join(_KEYS)}."
        raise RulesError(f"{key}.{spelled}", "is not a known key of a rule", shorten(rule[unknown]), remedy)
    for required in _KEYS:
        if required not in rule:
            raise RulesError(f"{key}.{required}", "is required", "nothing", f"For example: {_EXAMPLE}.")
    match, states = rule["match"], rule["states"]
    patterns = match if isinstance(match, list) else [match]
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        remedy = 'It matches full names of parameters; * stands for any text. For example: "match": "*.mlp.experts.*".'
        raise RulesError(f"{key}.match", "must be a pattern or a list of patterns", shorten(match), remedy)
    if len(patterns) > MAX_PATTERNS:
        raise RulesError(f"{key}.match", f"must have at most {MAX_PATTERNS:,} patterns", f"{len(patterns):,}", _FEWER)
    if (longest := max(map(len, patterns))) > MAX_PATTERN:
        rule = f"must have patterns of at most {MAX_PATTERN:,} characters"
        raise RulesError(f"{key}.match", rule, f"{longest:,}", "No name of a parameter is as long: shorten it.")
    known = get_args(States)
    if states not in known:
        remedy = did_you_mean(states, {choice: f'"{choice}"' for choice in known})
        remedy = remedy or 'With "planned", the planner chooses.'
        raise RulesError(f"{key}.states", 'must be "cpu", "streamed", "resident" or "planned"', shorten(states), remedy)
    return PlacementRule(tuple(patterns), states)


def _check_pattern(
    key: str, pattern: str, trained: Iterable[str], frozen: Iterable[str], aliases: Mapping[str, str]
) -> None:
    """Raise ``RulesError`` if ``pattern`` matches no parameter, or only further names of tied parameters."""
    if any(fnmatchcase(name, pattern) for names in (trained, frozen) for name in names):
        return
    for alias, first in aliases.items():
        if fnmatchcase(alias, pattern):
            found = f'{pattern!r}, which matches "{alias}", another name of "{first}"'
            remedy = f'A tied parameter has one name, the first. Match "{first}".'
            raise RulesError(key, "must match a parameter by the name that counts", found, remedy)
    names = [*trained, *frozen]
    remedy = f"The nearest names: {', '.join(nearest_names(pattern, names))}."
    if shell_pattern := shell_pattern_of(pattern, names):
        remedy = f'Patterns are those of a shell and match whole names: did you mean "{shell_pattern}"? {remedy}'
    raise RulesError(key, "must match a parameter of the model", repr(pattern), remedy)


def nearest_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names of parameters and layers that are most similar to ``pattern``, the nearest first.

    The nearest have most of the pattern's letters in common with it, in order; of these, the shortest come first. Of
    names that differ only in numbers, such as those of equal layers, only the first is returned.
    """
    candidates: dict[str, str] = {}
    for name in names:
        for text in (name, layer_of(name)):
            candidates.setdefault(re.sub(r"\d+", "0", text), text)
    spelled = re.sub(r"[*?\[\]!]+", "", pattern).strip(".")

    def distance(name: str) -> tuple[int, float]:
        matcher = difflib.SequenceMatcher(None, spelled, name, autojunk=False)
        common = sum(block.size for block in matcher.get_matching_blocks() if block.size >= COMMON_LETTERS)
        return -common, -matcher.ratio()

    return sorted(candidates.values(), key=distance)[:NEAREST]
