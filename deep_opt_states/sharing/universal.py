"""Read and write the folders of DeepSpeed's universal checkpoints, as files: nothing is unpickled here.

``zero/`` has a folder per parameter, with ``fp32.pt``, ``exp_avg.pt`` and ``exp_avg_sq.pt``, and ``optimizer_state.pt``
with the step count (deepspeed/checkpoint/ds_to_universal.py).
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deep_opt_states.files import replace_file
from deep_opt_states.sharing.renaming import DelinkError

WEIGHT = "fp32.pt"
_NO_LINKS = frozenset((errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP))
"""Errors of file systems that do not make this hard link."""


@dataclass(frozen=True, kw_only=True)
class UniversalCheckpoint:
    """The files of a universal checkpoint.

    ``parameters`` has the files of each parameter by their names. ``others`` has all other files by their paths
    relative to the checkpoint.
    """

    parameters: Mapping[str, Mapping[str, Path]]
    others: Mapping[Path, Path]

    @classmethod
    def read(cls, folder: Path) -> UniversalCheckpoint:
        """List the files in ``folder``. Raise ``DelinkError`` if it is no universal checkpoint."""
        zero = folder / "zero"
        if not (zero / "optimizer_state.pt").is_file():
            raise DelinkError(
                f"PSEUDO: must be a universal checkpoint, found {folder} without zero/optimizer_state.pt.\n"
                f"Convert a checkpoint first: python -m deepspeed.checkpoint.ds_to_universal --input_folder "
                f"CHECKPOINT/TAG --output_folder {folder}"
            )
        folders = [path for path in sorted(zero.iterdir()) if (path / WEIGHT).is_file()]
        others = [path for path in (*folder.iterdir(), *zero.iterdir()) if path.is_file()]
        return cls(
            parameters={path.name: {file.name: file for file in sorted(path.iterdir())} for path in folders},
            others={path.relative_to(folder): path for path in others},
        )


class FilePlacer:
    """A writer of one file to several paths, by hard links where the file system has them.

    ``copies``: the first path gets a copy, so that later changes of the file do not reach the new ones.
    """

    def __init__(self, *, copies: bool) -> None:
        self._copies = copies
        self.copied_because = "--copy" if copies else ""
        """The reason why files were copied; empty if all are links."""

    def place(self, source: Path, targets: Iterable[Path]) -> None:
        """Make ``targets``, each in an existing folder, files with the content of ``source``."""
        first = None
        for target in targets:
            if first is None and self._copies:
                _copy(source, target)
            else:
                self._link(first or source, target)
            first = first or target

    def _link(self, source: Path, target: Path) -> None:
        try:
            os.link(source.resolve(), target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self.copied_because = self.copied_because or f"no hard link: {error.strerror}"
            _copy(source, target)


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    sync(target)


def sync(path: Path) -> None:
    """Wait until the file or the entries of the folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def new_checkpoint(folder: Path) -> Iterator[Path]:
    """Yield an empty folder next to ``folder``, and rename it to ``folder`` when the block has succeeded.

    ``latest_universal`` names it then. A process that is killed leaves no ``folder``, and at most ``.NAME.partial``,
    which the next call with the same ``folder`` removes. Raise ``DelinkError`` if ``folder`` exists, or if another
    process writes it.
    """
    _refuse_existing(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DelinkError(
                f"REAL: must be written by one process at a time, found another one that writes {folder}.\n"
                f"Wait for it, or name another folder."
            ) from None
        # Another process may have written it since the first check.
        _refuse_existing(folder)
        # The process that wrote these has been killed, as its lock is free.
        for path in partial.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        try:
            yield partial
            for name, _, _ in os.walk(partial):
                sync(Path(name))
            os.rename(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)
    replace_file(folder.with_name("latest_universal"), folder.name)
    sync(folder.parent)


def _refuse_existing(folder: Path) -> None:
    if folder.exists():
        raise DelinkError(f"REAL: must be a new folder, found {folder}.\nRemove it, or name another folder.")
