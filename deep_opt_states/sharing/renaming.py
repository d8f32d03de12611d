"""Name the parameters of layers of their own after the layers that shared them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

from perf_model.json_input import shorten

# Five digits limit the names of a typo to those that fit into memory.
_RANGE = re.compile(r"(.*)\{(\d{1,5})\.\.(\d{1,5})\}(.*)")
_LAST_NUMBER = re.compile(r"\d+(?=\D*$)")


class DelinkError(ValueError):
    """The error for a checkpoint that cannot be made."""


def expand_range(pattern: str) -> list[str]:
    """Return the names of a pattern with at most one range: ``a.1`` and ``a.2`` for ``a.{1..2}``."""
    found = _RANGE.fullmatch(pattern)
    if found is None:
        return [pattern]
    before, first, last, after = found.groups()
    return [f"{before}{number}{after}" for number in range(int(first), int(last) + 1)]


def names_of_layers(share: str, into: Sequence[str], every: int) -> dict[str, list[str]]:
    """Return the layers that get the parameters of each shared layer, which is the first of them.

    Of ``every`` shared layers, ``share`` is the first. Layer ``i`` of the patterns ``into`` gets the parameters of
    layer ``first + (i - first) % every``. Raise ``DelinkError`` if a layer's name then contains no number.
    """
    names = [name for pattern in into for name in expand_range(pattern)]
    if every == 1:
        return {share: list(dict.fromkeys([share, *names]))}
    if every < 1:
        raise DelinkError(f"--every: must be at least 1, found {every}.\nCorrect the number.")
    first = _number(share)
    sources = [_LAST_NUMBER.sub(str(first + offset), share) for offset in range(every)]
    layers = {source: {source: None} for source in sources}
    for name in names:
        layers[sources[(_number(name) - first) % every]][name] = None
    return {source: list(new) for source, new in layers.items()}


def _number(name: str) -> int:
    found = _LAST_NUMBER.search(name)
    if found is None:
        raise DelinkError(
            f"With --every, the names of layers must have a number, found {shorten(name)}.\n"
            f'Write --share model.layers.0 --into "model.layers.{{1..47}}".'
        )
    return int(found[0])


def rename(names: Sequence[str], layers: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the new names of each of ``names``: one for each new layer, or its old name outside of ``layers``.

    Raise ``DelinkError`` if a layer contains no parameter, if two get one name, or if a name cannot be a folder's.
    """
    renamed = {name: [name] for name in names}
    for layer, new_layers in layers.items():
        inside = [name for name in names if f"{name}.".startswith(f"{layer}.")]
        if not inside:
            modules = {name[: dot.start()] for name in names for dot in re.finditer(r"\.", name)}
            near = difflib.get_close_matches(layer, [*names, *modules], n=3, cutoff=0.3)
            raise DelinkError(
                f"--share: must be a module or a parameter in the checkpoint, found {shorten(layer)}.\n"
                f"Similar names are {', '.join(near) or 'none'}. Frozen parameters are in no universal checkpoint."
            )
        renamed |= {name: [new + name[len(layer) :] for new in new_layers] for name in inside}
    old_names: dict[str, str] = {}
    for name, new in ((name, new) for name, new_names in renamed.items() for new in new_names):
        # Each name becomes a folder inside the checkpoint.
        if not new or new in (".", "..") or re.search(r"[/\\\0{}]", new):
            raise DelinkError(
                f"--into: must be names of layers, without slashes, and with one range at most, found {shorten(new)} "
                f'for {name}.\nSeparate modules by dots, and write a range in quotes: "model.layers.{{1..47}}".'
            )
        if new in old_names:
            raise DelinkError(
                f"Each new name must have one old name, found {new}, which is to be made of {old_names[new]} and of "
                f"{name}.\nLeave one of them out. A parameter outside of the layers keeps its name."
            )
        old_names[new] = name
    return renamed
