"""Test the plugin's logger, and that a start says what it waits for if that takes long."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils import cpp_extension

from deep_opt_states import log, waiting
from deep_opt_states.profiler.ranks import launched_ranks
from deep_opt_states.zero.start.node_share import SharingRanks
from tests.launch import free_port
from tests.ranks import on_ranks


@pytest.fixture(autouse=True)
def logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    logger = logging.getLogger("deep_opt_states")
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:], logger.level, logger.propagate = [], logging.NOTSET, True
    monkeypatch.setattr(log, "_rank", None)
    monkeypatch.delenv("RANK", raising=False)
    log._logger.cache_clear()
    yield logger
    logger.handlers[:], level, logger.propagate = before
    logger.setLevel(level)
    log._logger.cache_clear()


def lines_of_each(capsys: pytest.CaptureFixture[str]) -> list[str]:
    log.info("for all")
    log.warn("a warning for all")
    log.info_this_rank("of this rank")
    log.warn_this_rank("a warning of this rank")
    log.error(ValueError("broken"))
    return [line.removeprefix("[deep_opt_states] ") for line in capsys.readouterr().out.splitlines()]


def test_rank_0_logs_everything_and_other_ranks_only_what_concerns_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["of this rank", "WARNING: a warning of this rank", "ERROR: broken", "ValueError: broken"]
    # A handler of the root logger does not show lines twice.
    handler = logging.StreamHandler(sys.stdout)
    logging.getLogger().addHandler(handler)
    try:
        assert lines_of_each(capsys) == ["for all", "WARNING: a warning for all", *own]
    finally:
        logging.getLogger().removeHandler(handler)
    monkeypatch.setenv("RANK", "3")
    others = ["rank 3: of this rank", "WARNING: rank 3: a warning of this rank", "ERROR: rank 3: broken"]
    assert lines_of_each(capsys) == [*others, "ValueError: broken"]


class DropsInfo(logging.Logger):
    def isEnabledFor(self, level: int) -> bool:
        return level > logging.INFO


def test_the_rank_is_still_known_at_exit_and_no_class_of_loggers_drops_our_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(logging.Logger.manager.loggerDict, "deep_opt_states")
    monkeypatch.setattr(logging, "_loggerClass", DropsInfo)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    log.info("in training")
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    log.info("the summary")
    log.info_this_rank("late")
    assert logging.getLoggerClass() is DropsInfo
    assert capsys.readouterr().out == "[deep_opt_states] rank 2: late\n"


def test_a_handler_and_a_level_of_the_user_take_the_place_of_ours(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logger.setLevel(logging.ERROR)
    assert lines_of_each(capsys) == ["ERROR: broken", "ValueError: broken"]
    log._logger.cache_clear()
    to_file = logging.StreamHandler(written := io.StringIO())
    to_file.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
    logger.handlers[:] = [to_file]
    logger.propagate = True
    logger.setLevel(logging.INFO)
    log.info("a line with 100 %d")
    assert written.getvalue() == "deep_opt_states INFO a line with 100 %d\n"
    assert capsys.readouterr().out == ""
    assert logger.handlers == [to_file]
    assert logger.propagate


BROKEN = 'raises "rm"'


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(log, "info_this_rank", lines.append)
    monkeypatch.setattr(log, "warn_this_rank", lambda line: lines.append(f"! {line}"))
    return lines


def watch(explanation: str | None, lasts: Iterable[bool]) -> list[float]:
    """Watch a wait that goes on at the first few times at which it is looked at, and return the pauses before."""
    pauses, goes_on = [], iter(lasts)
    explain = mock.Mock(side_effect=OSError(BROKEN)) if explanation == BROKEN else lambda: explanation
    waiting._watch("compiling", explain, lambda pause_s: pauses.append(pause_s) or not next(goes_on))
    return pauses


@pytest.mark.parametrize(
    ("explanation", "begins", "ends"),
    [("why", "! compiling:", " so far. why"), ("", "compiling:", " so far."), (BROKEN, "compiling:", " so far.")],
)
def test_a_long_wait_is_logged_ever_more_rarely_until_it_ends(
    explanation: str, begins: str, ends: str, lines: list[str]
) -> None:
    """Check also that a short wait, and a rank that another one speaks for, are not logged."""
    assert watch(explanation, [False]) == [20.0]
    watch(None, [True, True, False])
    assert lines == []
    assert watch(explanation, [True, True, True, False]) == [20.0, 20.0, 40.0, 80.0]
    assert lines[:3] == [f"{begins} {waited} s{ends}" for waited in (20, 40, 80)]
    assert lines[3].startswith("compiling: ended after ")
    assert len(lines) == 4


def test_a_lock_is_explained_by_the_process_that_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    lock = tmp_path / "a folder" / "lock"
    lock.parent.mkdir()
    with lock.open("w") as file:
        assert waiting._explain_lock(lock) == "", "this process builds"
        assert waiting._explain_lock(lock, may_be_stale=False) == "", "the kernel releases it"
        builder = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=file)
    try:
        text = str(waiting._explain_lock(lock))
        assert text.startswith(f"Process {builder.pid} has been building it for 0:0")
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert waiting._explain_lock(lock) is None, "rank 0 of the node speaks"
    finally:
        builder.communicate(b"\n")


@pytest.mark.P6
def test_whoever_loads_an_extension_is_told_of_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check PyTorch's own loader, which would wait forever: the lock is removed once the line names it."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(waiting, "FIRST_S", 0.01)
    monkeypatch.setitem(sys.modules, "deepspeed", sys)
    source = tmp_path / "source.cpp"
    source.touch()
    lock = Path(cpp_extension._get_build_directory("an_op_of_deepspeed", False)) / "lock"
    lock.touch()
    warnings, ended = [], threading.Event()
    note = lambda line: (warnings.append(line), lock.unlink(missing_ok=True))  # noqa: E731
    monkeypatch.setattr(log, "warn_this_rank", note)
    monkeypatch.setattr(log, "info_this_rank", lambda line: ended.set() if "ended" in line else None)
    with pytest.raises(ImportError):
        cpp_extension.load("an_op_of_deepspeed", [str(source)])
    assert warnings[0].startswith("compiling or loading the extension an_op_of_deepspeed: 0 s so far. Its lock ")
    assert "a build that was killed has left it" in warnings[0]
    assert warnings[0].endswith(f"rm {lock}")
    assert ended.wait(timeout=60), "the watcher ends with the wait"


def test_only_the_first_rank_that_has_come_names_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    store.set(waiting._key(7, 0), "here")
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    assert waiting._missing_ranks(7, threading.get_ident()) is None


@pytest.mark.P6
def test_a_missing_rank_is_named_with_the_step_that_waits_for_it(tmp_path: Path) -> None:
    warnings, _ = on_ranks(2, gather_once_rank_1_is_missed, tmp_path / "marker", group=nullcontext)
    assert warnings[0].startswith("waiting for other ranks: 0 s so far. Missing in gather (node_share.py:")
    assert warnings[0].endswith("): rank 1.")


def gather_once_rank_1_is_missed(marker: Path) -> list[str]:
    lines: list[str] = []
    waiting.FIRST_S = 0.1
    log.warn_this_rank = lambda line: (lines.append(line), marker.touch())
    with launched_ranks(os.environ) as ranks:
        while ranks.rank == 1 and not marker.exists():
            time.sleep(0.01)
        SharingRanks.gather(ranks)
    return lines


@pytest.mark.parametrize(
    ("rank", "here", "expected"),
    [
        (0, [0, 2], "Missing: rank 1"),
        (2, [0, 2], "None"),
        (0, [0, 1, 2], ""),
        (0, [], "Nothing answers at 127.0.0.1:"),
        (1, [], "Nothing answers at 127.0.0.1:"),
    ],
)
def test_a_wait_in_init_distributed_names_the_missing_ranks_once(
    rank: int, here: list[int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "ANNOUNCED_S", 0)
    port = free_port()
    for name, value in {"RANK": rank, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    if here:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        for other in here:
            store.set(waiting._key(-1, other), "here")
    explained = str(waiting._missing_in_rendezvous())
    assert explained.startswith(expected)
    assert bool(explained) == bool(expected)


def test_init_distributed_of_deepspeed_is_watched(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FIRST_S", 0.01)
    comm = SimpleNamespace(init_distributed=lambda backend: time.sleep(0.2) or backend)
    waiting.watch_rendezvous(comm)
    assert comm.init_distributed("gloo") == "gloo"
    assert "waiting for other ranks in init_distributed" in lines[0]
