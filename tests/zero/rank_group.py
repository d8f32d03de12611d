"""Fork ranks from a program that itself decides when they start, and when they are killed."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from tests.fork_server import freeze_imported
from tests.launch import free_port, remove_shared_memory
from tests.zero.process_group import process_group


@dataclass
class Rank:
    """A forked process of a group, which writes both streams to the file ``output``."""

    rank: int
    world_size: int
    output: Path
    pid: int = 0


SomeRank = TypeVar("SomeRank", bound=Rank)


def fork(ranks: Sequence[SomeRank], port: int) -> SomeRank | None:
    """Fork a process per rank. Return None in the parent, and in each child the rank that it is."""
    freeze_imported()
    for rank in ranks:
        # Opened here: a rank that is killed at once has an output, too.
        output = os.open(rank.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        rank.pid = os.fork()
        if rank.pid == 0:
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ.update(
                RANK=str(rank.rank),
                LOCAL_RANK=str(rank.rank),
                WORLD_SIZE=str(rank.world_size),
                LOCAL_SIZE=str(rank.world_size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
            return rank
        os.close(output)
    return None


class Group:
    """``world_size`` ranks that run ``work`` in a process group, and write their output to files in ``folder``."""

    def __init__(self, work: Callable[[], object], world_size: int, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._port = free_port()
        self.ranks = [Rank(rank, world_size, folder / f"output {rank}") for rank in range(world_size)]
        self._running = {rank.pid: rank for rank in self.ranks} if self._fork(work) else {}
        self._codes: dict[int, int] = {}

    def _fork(self, work: Callable[[], object]) -> bool:
        if fork(self.ranks, self._port) is None:
            return True
        try:
            with process_group():
                work()
        except BaseException:  # noqa: BLE001 (this is the end of the process)
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)

    def kill_one(self, rank: int) -> None:
        """Kill a rank with SIGKILL."""
        os.kill(self.ranks[rank].pid, signal.SIGKILL)

    def kill(self, *, first: int, others_after_s: float) -> None:
        """Kill rank ``first`` with SIGKILL, and all others ``others_after_s`` later, with their children."""
        children = [child for pid in self._running for child in psutil.Process(pid).children(recursive=True)]
        self.kill_one(first)
        time.sleep(others_after_s)
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()

    def alive(self) -> bool:
        """Return whether any rank still runs."""
        for pid in list(self._running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._codes[self._running.pop(pid).rank] = os.waitstatus_to_exitcode(status)
        return bool(self._running)

    def codes(self, timeout_s: float) -> list[int]:
        """Wait for all ranks, and return their exit codes.

        Ranks that still run after the timeout are aborted, and write a traceback.
        """
        end_s = time.monotonic() + timeout_s
        while self.alive():
            if time.monotonic() > end_s:
                for pid in self._running:
                    os.kill(pid, signal.SIGABRT)
                end_s = float("inf")
            time.sleep(0.01)
        remove_shared_memory(self._port)
        return [self._codes[rank.rank] for rank in self.ranks]

    def problem(self, timeout_s: float) -> str:
        """Wait for all ranks. Return "" if all have succeeded, otherwise exit codes and the ends of all outputs."""
        codes = self.codes(timeout_s)
        if not any(codes):
            return ""
        return "\n".join([str(codes), *(rank.output.read_text()[-4000:] for rank in self.ranks)])
