"""Make the universal checkpoint of a model whose layers have parameters of their own from that of shared layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from deep_opt_states.sharing.renaming import DelinkError, Prefixes, rename
from deep_opt_states.sharing.universal import FilePlacer, UniversalCheckpoint, new_checkpoint, sync

Moments = Literal["mean", "copy", "zero"]

_POWERS = {"exp_avg.pt": 1, "exp_avg_sq.pt": 2}
"""The moments by their files: the power of the gradient that they are the running mean of."""


@dataclass(frozen=True, kw_only=True)
class Delink:
    """A checkpoint with the files of ``source`` under new names.

    ``names`` has the new names by the old name. The moments of a parameter with L > 1 new names follow ``moments``:

    - ``mean``: exp_avg / L and exp_avg_sq / L^2. The gradient of a shared parameter is the sum over its L uses, and
      that of each new parameter is one of these terms, on average the L-th part of the sum.
    - ``copy``: unchanged, for gradients that were divided by L in training (``share_layers`` with ``scale="mean"``).
    - ``zero``: zeros.
    """

    source: UniversalCheckpoint
    names: Mapping[str, Sequence[str]]
    moments: Moments

    @classmethod
    def read(cls, folder: Path, prefixes: Prefixes, moments: Moments) -> Delink:
        """Read the names of the checkpoint in ``folder``, and rename them. Raise ``DelinkError`` if that fails."""
        source = UniversalCheckpoint.read(folder)
        return cls(source=source, names=rename(list(source.parameters), prefixes), moments=moments)

    @property
    def new_names(self) -> list[str]:
        """Return all names of the new checkpoint, in alphabetical order."""
        return sorted(name for names in self.names.values() for name in names)

    def apparent_bytes(self) -> int:
        """Return the size of the new checkpoint if each file counts, also those that are one file on the disk."""
        parameters = sum(
            len(self.names[name]) * path.stat().st_size
            for name, files in self.source.parameters.items()
            for path in files.values()
        )
        return parameters + sum(path.stat().st_size for path in self.source.others.values())

    def rewritten_bytes(self) -> int:
        """Return the size of the moments that are written anew. All other files can be links."""
        return sum(
            path.stat().st_size
            for name, files in self.source.parameters.items()
            for file, path in files.items()
            if self._is_rewritten(name, file)
        )

    def write(self, folder: Path, *, copies: bool = False) -> str:
        """Write the checkpoint, with hard links or ``copies``, and return the reason for copies, empty if none.

        It is written to a temporary folder, which is renamed when it is complete, and then ``latest_universal`` next to
        it names it. Memory holds one moment of one parameter, twice. Raise ``DelinkError`` if ``folder`` exists, or if
        a file has other content than tensors; raise ``OSError`` if the file system fails.
        """
        placer = FilePlacer(copies=copies)
        with new_checkpoint(folder) as unfinished:
            (unfinished / "zero").mkdir()
            for path, source in self.source.others.items():
                placer.place(source, [unfinished / path])
            for old, files in self.source.parameters.items():
                folders = [unfinished / "zero" / new for new in self.names[old]]
                for new_folder in folders:
                    new_folder.mkdir()
                for name, source in files.items():
                    self._write_file(old, name, source, [new_folder / name for new_folder in folders], placer)
        return placer.copied_because

    def _write_file(self, old: str, name: str, source: Path, targets: Sequence[Path], placer: FilePlacer) -> None:
        if not self._is_rewritten(old, name):
            placer.place(source, targets)
            return
        divisor = len(targets) ** _POWERS[name]
        rule = torch.zeros_like if self.moments == "zero" else partial(torch.div, other=divisor)
        torch.save(_changed(_load(source), rule, source), targets[0])
        sync(targets[0])
        # The new file belongs to this checkpoint alone, so links to it are safe also where copies are wanted.
        FilePlacer(copies=False).place(targets[0], targets[1:])

    def _is_rewritten(self, old: str, name: str) -> bool:
        return self.moments != "copy" and len(self.names[old]) > 1 and name in _POWERS


def _load(path: Path) -> Any:
    """Return the tensor, or the dict with it, in a file, without unpickling other objects."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 (torch raises errors of many classes for files that it cannot read)
        raise DelinkError(
            f"The moments in a checkpoint must be tensors that torch.load(weights_only=True) reads, found {path}: "
            f"{str(error).splitlines()[0]}\nConvert the checkpoint again, or use --moments copy, which reads no file."
        ) from None


def _changed(content: Any, rule: Callable[[Tensor], Tensor], path: Path) -> Any:
    """Return ``content`` with the tensor in it replaced by what ``rule`` makes of it."""
    if isinstance(content, Tensor):
        return rule(content)
    # ZeRO stages 1 and 2, and tensor parallelism, save the tensor with a description of how it was split.
    if isinstance(content, dict) and isinstance(content.get("param"), Tensor):
        return {**content, "param": rule(content["param"])}
    raise DelinkError(
        f'A moment must be a tensor or a dict with a tensor "param", found {type(content).__name__} in {path}.\n'
        "Convert the checkpoint again, with the release of DeepSpeed that has saved it."
    )
