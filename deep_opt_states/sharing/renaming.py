"""Give the parameters of one model the names of another: a parameter gets one new name, several or none."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

from perf_model.json_input import parse_json, shorten

Prefixes = Mapping[str, Sequence[str]]
"""The new names by an old name. A name is that of a parameter, or of a module for all parameters inside it."""

MAX_NAMES = 100_000
"""The largest number of names that one pattern may stand for."""

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


class DelinkError(ValueError):
    """The error for a checkpoint that cannot be made. The message has the rule, the value found and the remedy."""


def expand_braces(pattern: str) -> list[str]:
    """Return the names that ``pattern`` stands for: ``{1..3}`` is 1, 2 and 3, and ``{a,b}`` is a and b.

    Several braces stand for all combinations. Raise ``DelinkError`` for another use of braces.
    """
    parts = _BRACES.split(pattern)
    # The parts at odd positions are those in braces.
    choices = [_choices(part, pattern) if position % 2 else [part] for position, part in enumerate(parts)]
    number = 1
    for alternatives in choices:
        number *= len(alternatives)
    if number > MAX_NAMES:
        raise DelinkError(
            f"A pattern must stand for at most {MAX_NAMES:,} names, found {number:,} in {shorten(pattern)}.\n"
            f"Correct the ranges in the braces."
        )
    return ["".join(combination) for combination in itertools.product(*choices)]


def _choices(text: str, pattern: str) -> Sequence[str]:
    found = _RANGE.fullmatch(text)
    if found is not None:
        first, last = int(found[1]), int(found[2])
        if first <= last < first + MAX_NAMES:
            return [str(number) for number in range(first, last + 1)]
    elif "," in text:
        return text.split(",")
    raise DelinkError(
        f"Braces must have a range such as {{1..47}}, of at most {MAX_NAMES:,} numbers, or names such as {{a,b}}, "
        f"found {shorten(pattern)}.\nWrite the pattern in quotes, so that the shell does not change it."
    )


def prefixes_of_layers(share: str, into: Iterable[str], every: int) -> dict[str, list[str]]:
    """Return the new names of layers that share parameters: those of ``share`` and of the patterns ``into``.

    With ``every`` above 1, ``share`` is the first of ``every`` layers with parameters, and layer ``i`` of ``into`` gets
    those of layer ``first + (i - first) % every``. Raise ``DelinkError`` if a layer's name then has no number.
    """
    names = [name for pattern in into for name in expand_braces(pattern)]
    if every == 1:
        return {share: list(dict.fromkeys([share, *names]))}
    first = _number(share)
    sources = [_with_number(share, first + offset) for offset in range(every)]
    prefixes = {source: [source] for source in sources}
    for name in names:
        source = sources[(_number(name) - first) % every]
        if name not in prefixes[source]:
            prefixes[source].append(name)
    return prefixes


_LAST_NUMBER = re.compile(r"\d+(?=\D*$)")


def _number(name: str) -> int:
    found = _LAST_NUMBER.search(name)
    if found is None:
        raise DelinkError(
            f"With --every, the names of layers must have a number, found {shorten(name)}.\n"
            f'Write --share model.layers.0 --into "model.layers.{{1..47}}", or use --map.'
        )
    return int(found[0])


def _with_number(name: str, number: int) -> str:
    return _LAST_NUMBER.sub(str(number), name)


def parse_prefixes(text: str) -> dict[str, list[str]]:
    """Return the prefixes in a JSON object whose values are lists of names or patterns; raise ``DelinkError``."""
    rule = 'A map must be a JSON object such as {"model.layers.0": ["model.layers.0", "model.layers.{1..47}"]}'
    try:
        found = parse_json(text)
    except ValueError as error:
        raise DelinkError(f"{rule}, found no JSON: {error}.\nCorrect the file.") from None
    if not isinstance(found, dict):
        raise DelinkError(f"{rule}, found {shorten(found)}.\nWrite an object.")
    for key, names in found.items():
        if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise DelinkError(f"{rule}, found {shorten(key)}: {shorten(names)}.\nWrite a list of names.")
    return {key: [new for name in names for new in expand_braces(name)] for key, names in found.items()}


def rename(names: Sequence[str], prefixes: Prefixes) -> dict[str, list[str]]:
    """Return the new names of each of ``names``. A name that ``prefixes`` does not cover is kept.

    The longest prefix counts. Raise ``DelinkError`` if a prefix covers no parameter, if two parameters get one name,
    or if a new name cannot be that of a folder.
    """
    renamed: dict[str, list[str]] = {}
    used = set()
    for name in names:
        prefix = max((prefix for prefix in prefixes if _covers(prefix, name)), key=len, default=None)
        if prefix is None:
            renamed[name] = [name]
        else:
            used.add(prefix)
            renamed[name] = [new + name[len(prefix) :] for new in prefixes[prefix]]
    for prefix in prefixes:
        if prefix not in used and not any(_covers(prefix, name) for name in names):
            near = difflib.get_close_matches(prefix, [*names, *_modules(names)], n=3, cutoff=0.3)
            raise DelinkError(
                f"Each old name must be that of a parameter, or of a module with parameters, in the checkpoint; found "
                f"{shorten(prefix)}, which is neither. Frozen parameters are in no universal checkpoint.\n"
                f"Similar names are {', '.join(near) or 'none'}."
            )
    _check_new_names(renamed)
    return renamed


def _covers(prefix: str, name: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _modules(names: Iterable[str]) -> set[str]:
    return {name[: dot.start()] for name in names for dot in re.finditer(r"\.", name)}


def _check_new_names(renamed: Mapping[str, Sequence[str]]) -> None:
    old_names: dict[str, str] = {}
    for old, names in renamed.items():
        for name in names:
            # Each name becomes a folder, which must be inside the checkpoint.
            if not name or name in (".", "..") or re.search(r"[/\\\0]", name):
                raise DelinkError(
                    f"A new name must be that of a parameter, without slashes, found {shorten(name)} for {old}.\n"
                    f"Separate modules by dots."
                )
            if name in old_names:
                raise DelinkError(
                    f"Each new name must have one old name, found {name}, which is to be made of {old_names[name]} and "
                    f"of {old}.\nLeave one of them out. A parameter that no old name covers keeps its name."
                )
            old_names[name] = old
