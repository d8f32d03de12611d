"""Make a universal checkpoint of a model whose layers share parameters into one with parameters for each layer.

Its folder ``zero/`` contains ``optimizer_state.pt``, and a folder per parameter with ``fp32.pt``, ``exp_avg.pt`` and
``exp_avg_sq.pt`` (deepspeed/checkpoint/ds_to_universal.py).
"""

from __future__ import annotations

import difflib
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deep_opt_states.files import replace_file
from perf_model.json_input import shorten

_POWERS = {"exp_avg.pt": 1, "exp_avg_sq.pt": 2}
"""The power of the gradient of which each moment is the running mean."""

# Five digits limit the names of a typo to those that fit into memory.
_RANGE = re.compile(r"(.*)\{(\d{1,5})\.\.(\d{1,5})\}(.*)")
_LAST_NUMBER = re.compile(r"\d+(?=\D*$)")


class DelinkError(ValueError):
    """The error for a checkpoint that cannot be made."""


@dataclass(frozen=True, kw_only=True)
class Delink:
    """The checkpoint in ``folder``, with the new ``names`` of each parameter.

    The ``moments`` of a parameter with L > 1 new names are:

    - ``mean``: exp_avg / L and exp_avg_sq / L^2, since a shared gradient is the sum over its L uses.
    - ``copy``: unchanged, for gradients that were divided by L in training (``share_layers`` with ``scale="mean"``).
    - ``zero``: zeros.
    """

    folder: Path
    names: Mapping[str, Sequence[str]]
    moments: str

    @classmethod
    def read(cls, folder: Path, layers: Mapping[str, Sequence[str]], moments: str) -> Delink:
        """Return the universal checkpoint in ``folder``, with new names. Raise ``DelinkError`` if it cannot be made."""
        zero = folder / "zero"
        if not (zero / "optimizer_state.pt").is_file():
            raise DelinkError(
                f"PSEUDO: must be a universal checkpoint, found {folder} without zero/optimizer_state.pt.\n"
                f"Convert a checkpoint first: python -m deepspeed.checkpoint.ds_to_universal --input_folder "
                f"CHECKPOINT/TAG --output_folder {folder}"
            )
        parameters = [path.name for path in sorted(zero.iterdir()) if (path / "fp32.pt").is_file()]
        return cls(folder=folder, names=rename(parameters, layers), moments=moments)

    def write(self, folder: Path, *, copies: bool = False) -> None:
        """Write the checkpoint, with hard links or ``copies``.

        It is complete or absent. Raise ``OSError``, or ``DelinkError`` if ``folder`` exists or a file lacks a tensor.
        """
        with _new_checkpoint(folder) as unfinished:
            zero, new_zero = self.folder / "zero", unfinished / "zero"
            new_zero.mkdir()
            for path in filter(Path.is_file, (*self.folder.iterdir(), *zero.iterdir())):
                _place(path, [unfinished / path.relative_to(self.folder)], copies)
            for old, new_names in self.names.items():
                for new in new_names:
                    (new_zero / new).mkdir()
                for source in sorted((zero / old).iterdir()):
                    targets = [new_zero / new / source.name for new in new_names]
                    if self.moments == "copy" or len(targets) == 1 or source.name not in _POWERS:
                        _place(source, targets, copies)
                    else:
                        divisor = len(targets) ** _POWERS[source.name]
                        rule = torch.zeros_like if self.moments == "zero" else partial(torch.div, other=divisor)
                        torch.save(_changed(source, rule), targets[0])
                        _sync(targets[0])
                        # Links to the new file are safe, because it belongs to this checkpoint alone.
                        _place(targets[0], targets[1:], copies=False)


def _changed(path: Path, rule: Callable[[Tensor], Tensor]) -> Any:
    """Return the tensor in a file, or the dict that contains it, changed by ``rule``. Unpickle no other objects."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        # ZeRO stages 1 and 2, and tensor parallelism, save a dict that describes how the tensor was split.
        return {**content, "param": rule(content["param"])} if isinstance(content, dict) else rule(content)
    except Exception as error:  # noqa: BLE001 (torch raises errors of many classes for files that it cannot read)
        raise DelinkError(
            f"The moments in a checkpoint must be tensors that torch.load(weights_only=True) reads, found {path}: "
            f"{next(iter(str(error).splitlines()), '')}\n"
            f"Convert the checkpoint again, or use --moments copy, which reads no file."
        ) from None


def _place(source: Path, targets: Sequence[Path], copies: bool) -> None:
    """Make ``targets`` hard links to ``source``, or to a copy of it with ``copies``, or if links are not possible."""
    first = source
    for target in targets:
        # Later changes of ``source`` must not reach the other links to a copy.
        with suppress(OSError):
            if not copies or first is not source:
                os.link(first.resolve(), target)
        if not target.exists():
            shutil.copyfile(first, target)
            _sync(target)
        first = targets[0]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _new_checkpoint(folder: Path) -> Iterator[Path]:
    """Yield an empty folder, which becomes ``folder``, and the latest of its parent, when the block has succeeded.

    A killed process leaves at most ``.NAME.partial``, which the next call removes. Raise ``DelinkError`` if ``folder``
    exists, or if another process writes it.
    """
    unfinished = folder.with_name(f".{folder.name}.partial")
    unfinished.mkdir(exist_ok=True)
    descriptor = os.open(unfinished, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DelinkError(
                f"REAL: must be written by one process at a time, found another one that writes {folder}.\n"
                f"Wait for it, or name another folder."
            ) from None
        try:
            if folder.exists():
                raise DelinkError(f"REAL: must be a new folder, found {folder}.\nRemove it, or name another folder.")
            # The process that wrote these was killed, since its lock is free.
            for path in unfinished.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            yield unfinished
            for name, _, _ in os.walk(unfinished):
                _sync(Path(name))
            os.rename(unfinished, folder)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)
    replace_file(folder.with_name("latest_universal"), folder.name)
    _sync(folder.parent)


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
    """Return the new names of each of ``names``: one for each new layer, or its old name outside of ``layers``."""
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
