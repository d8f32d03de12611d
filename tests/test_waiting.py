"""Test that a start says what it waits for: with its lock, the missing ranks and the time, but only if that is long."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils import cpp_extension

from deep_opt_states import log, waiting
from deep_opt_states.profiler.ranks import launched_ranks
from deep_opt_states.zero.start.node_share import SharingRanks
from tests.ranks import on_ranks

BROKEN = 'raises "rm"'


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list to which each line is appended, warnings after an exclamation mark."""
    lines: list[str] = []
    monkeypatch.setattr(log, "info_this_rank", lines.append)
    monkeypatch.setattr(log, "warn_this_rank", lambda line: lines.append(f"! {line}"))
    return lines


def watch(explanation: str | None, lasts: Iterable[bool]) -> list[float]:
    """Watch a wait that goes on at the first few times at which it is looked at, and return the pauses before."""
    pauses, goes_on = [], iter(lasts)

    def has_ended(pause_s: float) -> bool:
        pauses.append(pause_s)
        return not next(goes_on)

    def explain() -> str | None:
        if explanation == BROKEN:
            raise OSError(BROKEN)
        return explanation

    waiting._watch("compiling", explain, has_ended)
    return pauses


def test_a_short_wait_is_not_logged(lines: list[str]) -> None:
    assert watch("why", [False]) == [20.0]
    assert lines == []


@pytest.mark.parametrize(
    ("explanation", "begins", "ends"),
    [("why", "! compiling:", " so far. why"), ("", "compiling:", " so far."), (BROKEN, "compiling:", " so far.")],
)
def test_a_long_wait_is_logged_ever_more_rarely_until_it_ends(
    explanation: str, begins: str, ends: str, lines: list[str]
) -> None:
    assert watch(explanation, [True, True, True, False]) == [20.0, 20.0, 40.0, 80.0]
    assert lines[:3] == [f"{begins} {waited} s{ends}" for waited in (20, 40, 80)]
    assert lines[3].startswith("compiling: ended after ")
    assert len(lines) == 4


def test_a_rank_that_another_one_speaks_for_is_silent(lines: list[str]) -> None:
    watch(None, [True, True, False])
    assert lines == []


def test_the_watcher_runs_beside_the_body_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FIRST_S", 0.01)
    logged, ended = threading.Event(), threading.Event()

    def tell(line: str) -> None:
        (ended if "ended" in line else logged).set()

    monkeypatch.setattr(log, "info_this_rank", tell)
    with waiting.waiting("measuring"):
        assert logged.wait(timeout=60)
        assert not ended.is_set()
    assert ended.wait(timeout=60)


def test_a_lock_that_no_process_has_open_is_explained_with_its_age_and_the_remedy(tmp_path: Path) -> None:
    lock = tmp_path / "a folder" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (0, lock.stat().st_mtime - 2 * 24 * 3600))
    text = waiting._explain_lock(lock)
    assert text is not None
    assert text.startswith(f"Its lock {lock} is 2 days, 0:00:")
    assert "a build that was killed has left it" in text
    assert text.endswith(f"rm '{lock}'")


def test_a_build_of_this_process_needs_no_explanation_and_one_of_another_is_named_once_per_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    lock = tmp_path / "lock"
    with lock.open("w") as file:
        assert waiting._explain_lock(lock) == ""
        builder = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=file)
    try:
        text = waiting._explain_lock(lock)
        assert text is not None
        assert text.startswith(f"Process {builder.pid} has been building it for 0:0")
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert waiting._explain_lock(lock) is None
    finally:
        builder.communicate(b"\n")


@pytest.mark.promise("P6")
def test_whoever_loads_an_extension_is_told_of_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check PyTorch's own loader, which would wait forever: the lock is removed once the line names it."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(waiting, "FIRST_S", 0.01)
    monkeypatch.setitem(sys.modules, "deepspeed", sys)
    source = tmp_path / "source.cpp"
    source.touch()
    lock = Path(cpp_extension._get_build_directory("an_op_of_deepspeed", False)) / "lock"
    lock.touch()
    warnings = []

    def tell(line: str) -> None:
        warnings.append(line)
        lock.unlink(missing_ok=True)

    monkeypatch.setattr(log, "warn_this_rank", tell)
    with pytest.raises(ImportError):
        cpp_extension.load("an_op_of_deepspeed", [str(source)])
    assert warnings[0].startswith("compiling or loading the extension an_op_of_deepspeed: 0 s so far. Its lock ")
    assert str(lock) in warnings[0]


@pytest.mark.parametrize("has_come", [(0, 1), (1, 2), (0,), (0, 1, 2)])
def test_the_first_rank_that_has_come_names_the_others(
    has_come: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    for rank in has_come:
        store.set(waiting._key(7, rank), "here")
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(waiting, "__file__", __file__)
    for rank in has_come:
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        text = waiting._missing_ranks(7, threading.get_ident())
        if rank > has_come[0]:
            assert text is None
        else:
            missing = ", ".join(str(rank) for rank in range(3) if rank not in has_come) or "none"
            assert text is not None
            assert text.endswith(f": rank {missing}.")


@pytest.mark.promise("P6")
def test_a_missing_rank_is_named_with_the_step_that_waits_for_it(tmp_path: Path) -> None:
    warnings, _ = on_ranks(2, gather_once_rank_1_is_missed, tmp_path / "marker", group=nullcontext)
    assert warnings[0].startswith("waiting for other ranks: 0 s so far. Missing in gather (node_share.py:")
    assert warnings[0].endswith("): rank 1.")


def gather_once_rank_1_is_missed(marker: Path) -> list[str]:
    """Gather values of two ranks, of which rank 1 comes once rank 0 has logged that it is missing."""
    lines: list[str] = []

    def tell(line: str) -> None:
        lines.append(line)
        marker.touch()

    waiting.FIRST_S = 0.1
    log.warn_this_rank = tell
    with launched_ranks(os.environ) as ranks:
        while ranks.rank == 1 and not marker.exists():
            time.sleep(0.01)
        SharingRanks.gather(ranks)
    return lines
