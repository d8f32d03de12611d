"""Find out what a user meant by another word for a placement, by a regular expression, or by a rule outside a list."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from perf_model.json_input import printable

MAX_SHOWN = 300
"""The most characters of a user's own rules in an error."""

_ON_ACCELERATOR = ("gpu", "cuda", "device", "accelerator", "vram", "hbm")
_IN_HOST_MEMORY = ("host", "ram", "offload", "pinned")
_NO_CHOICE = ("auto", "default", "fastest", "best")


def did_you_mean(word: object, choices: Mapping[str, str]) -> str:
    """Return a question that names the ``choices`` which are most like ``word``; empty if none is.

    ``choices`` maps "cpu", "streamed" and so on to the text that the user has to write for it.
    """
    if not isinstance(word, str):
        return ""
    letters = printable(word, 100).lower()
    meant = [choice for choice in choices if choice in letters]
    if not meant and any(other in letters for other in _ON_ACCELERATOR):
        return (
            f"Did you mean {choices['resident']}, which keeps the states on the GPU, or {choices['streamed']}, which "
            f"keeps them in host memory and copies them to the GPU for each update?"
        )
    if not meant:
        others = {"cpu": _IN_HOST_MEMORY, "planned": _NO_CHOICE}
        meant = [choice for choice, words in others.items() if choice in choices and any(w in letters for w in words)]
    if not meant:
        meant = difflib.get_close_matches(letters, choices, n=1)
    return f"Did you mean {choices[meant[0]]}?" if meant else ""


def rules_as_list(value: Mapping[object, object]) -> str:
    """Return the JSON of the list of rules that a dictionary stands for; empty if it is no rule.

    That is a rule itself, a dictionary from patterns to states, or one with a list of rules as its only value.
    """
    rules: list[object] = [value]
    if len(value) == 1 and isinstance(only := next(iter(value.values())), list):
        rules = only
    elif not value.keys() & {"match", "states"}:
        rules = [{"match": pattern, "states": states} for pattern, states in value.items()]
    if not rules or not all(isinstance(rule, Mapping) and rule and _is_simple(rule) for rule in rules):
        return ""
    return printable(json.dumps(rules), MAX_SHOWN)


def _is_simple(rule: Mapping[object, object]) -> bool:
    """Return whether all keys are texts, and all values texts or lists of texts."""
    values = [part for value in rule.values() for part in (value if isinstance(value, list) else [value])]
    return all(isinstance(part, str) for part in (*rule.keys(), *values))


def shell_pattern_of(pattern: str, names: Iterable[str]) -> str:
    """Return the shell pattern that a regular expression stands for, if it matches one of ``names``, else "".

    The expression is not executed: an unlucky one would take years.
    """
    text = pattern.removeprefix("^").removesuffix("$")
    for expression, shell in ((r"(\.|\\[dw]|\[[^\]]*\])[*+]\??", "*"), (r"\\[dw]", "?"), (r"\\(\W)", r"\1")):
        text = re.sub(expression, shell, text)
    names = list(names)
    for candidate in (text, f"{text.rstrip('*')}*", f"*{text.strip('*')}*"):
        if candidate != pattern and any(fnmatchcase(name, candidate) for name in names):
            return candidate
    return ""
