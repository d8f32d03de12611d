"""Start the ranks of a module of tests once per world size, however many of its tests look at their answers."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.launch import Finished, run_ranks


@dataclass(frozen=True)
class ProgramRanks:
    """The program that a module of tests starts; the module has one as ``RANKS``, or several as ``SELECTIONS``."""

    program: str
    """The name of a module, run by each rank."""
    timeout_s: float
    arguments: Callable[[Path], Sequence[str]] = lambda folder: ()
    """Return the arguments of the program, given a temporary folder per world size."""
    fresh: Container[int] = ()
    """The world sizes at which each rank needs a fresh interpreter."""


class TrainingOnce:
    """The ranks of a module of tests: those of a world size are started when a test first needs them."""

    def __init__(self, ranks: ProgramRanks, new_folder: Callable[[], Path]) -> None:
        self._ranks = ranks
        self._new_folder = new_folder
        self._folders: dict[int, Path] = {}
        self._finished: dict[int, list[Finished]] = {}

    def folder(self, world_size: int) -> Path:
        """Return the temporary folder of the ranks, before or after they were started."""
        if world_size not in self._folders:
            self._folders[world_size] = self._new_folder()
        return self._folders[world_size]

    def finished(self, world_size: int) -> list[Finished]:
        """Return the ranks after they have ended; fail the test if one of them has failed."""
        if world_size not in self._finished:
            arguments = ["-m", self._ranks.program, *self._ranks.arguments(self.folder(world_size))]
            self._finished[world_size] = run_ranks(
                world_size, arguments, timeout_s=self._ranks.timeout_s, fresh=world_size in self._ranks.fresh
            )
        for rank, finished in enumerate(self._finished[world_size]):
            assert finished.returncode == 0, f"rank {rank} of {world_size}:\n{finished.output[-5000:]}"
        return self._finished[world_size]

    def answers(self, world_size: int) -> list[list[Any]]:
        """Return the answers of each rank."""
        return [finished.answers() for finished in self.finished(world_size)]

    def answers_by_name(self, world_size: int, key: str = "name") -> list[dict[str, Any]]:
        """Return the answers of each rank by their entry ``key``."""
        return [{answer[key]: answer for answer in answers} for answers in self.answers(world_size)]


def on_one_worker(program: str, *world_sizes: int) -> pytest.MarkDecorator:
    """Return the mark of tests that look at the same ranks: one worker of pytest-xdist runs them all."""
    return pytest.mark.xdist_group(" ".join([program.rpartition(".")[2], *map(str, world_sizes)]))
