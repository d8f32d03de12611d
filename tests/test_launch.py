"""Check how ranks are started: the ports of their rendezvous, and which ranks are forked."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest, launch
from tests.fork_server import ForkedProcess
from tests.launch import free_port, is_running, run_ranks, shared_buffers

RANKS = "tests.launched_ranks"


def test_no_two_workers_share_a_port_with_each_other_or_with_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "3")
    remainders: list[int] = []
    for worker in range(3):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{worker}")
        ports = {free_port() for _ in range(50)}
        assert max(ports) < 32_768
        (remainder,) = {port % 3 for port in ports}
        remainders.append(remainder)
    assert len(set(remainders)) == 3, "ports with different remainders are different"


def test_a_port_that_is_in_use_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(random.SystemRandom, "sample", lambda *_: [taken.getsockname()[1], free])
        assert free_port() == free


def test_the_end_of_a_session_keeps_the_buffer_of_a_rank_that_runs() -> None:
    """Check that a rank of another session can still open it: without the buffer, DeepSpeed waits without limit."""
    buffer = Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{free_port()}_0")
    session: Any = SimpleNamespace(config=object(), stash={conftest.BUFFERS_BEFORE: shared_buffers()})
    program = "import sys; file = open(sys.argv[1], 'w'); print('open', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(buffer)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "open\n"
        conftest.pytest_sessionfinish(session)
        assert buffer.exists()
        rank.communicate()
    session.stash[conftest.BUFFERS_BEFORE] = shared_buffers() - {buffer}
    conftest.pytest_sessionfinish(session)
    assert not buffer.exists()


def test_a_forked_rank_has_the_environment_arguments_and_threads_of_a_fresh_rank(tmp_path: Path) -> None:
    arguments = ["-m", RANKS, "describe", "a b", ""]
    forked = run_ranks(2, arguments, timeout_s=200, XDG_CACHE_HOME=str(tmp_path))
    fresh = run_ranks(2, arguments, timeout_s=200, XDG_CACHE_HOME=str(tmp_path), fresh=True)
    for rank, (ours, reference) in enumerate(zip(forked, fresh, strict=True)):
        assert (ours.returncode, reference.returncode) == (0, 0), ours.output + reference.output
        (found,), (expected,) = ours.answers(), reference.answers()
        assert found.pop("forked")
        assert not expected.pop("forked")
        # Each call of run_ranks has its own port.
        assert found["environment"].pop("MASTER_PORT") != expected["environment"].pop("MASTER_PORT")
        assert found == expected
        assert found["environment"]["RANK"] == str(rank)
        assert found["environment"]["XDG_CACHE_HOME"] == str(tmp_path)


def test_forked_ranks_draw_different_numbers() -> None:
    drawn = [finished.answers()[0] for finished in run_ranks(3, ["-m", RANKS, "draw"], timeout_s=60)]
    for library in ("random", "numpy", "torch"):
        assert len({numbers[library] for numbers in drawn}) == 3, library


@pytest.mark.parametrize(
    ("ending", "code", "written"),
    [
        ("return", 0, "exit callback"),
        ("exit 7", 7, "exit callback"),
        ("raise", 1, "ValueError: raised on purpose"),
        ("kill", -signal.SIGKILL, ""),
        ("_exit 3", 3, ""),
    ],
)
def test_the_end_of_a_forked_rank_is_reported(ending: str, code: int, written: str) -> None:
    (finished,) = run_ranks(1, ["-m", RANKS, *ending.split()], timeout_s=60)
    assert finished.returncode == code
    assert written in finished.output
    assert "written to stdout" in finished.output
    assert "written to stderr" in finished.output


def test_forked_ranks_that_outlive_the_timeout_are_killed_with_their_children() -> None:
    ranks = run_ranks(2, ["-m", RANKS, "hang"], timeout_s=3)
    for finished in ranks:
        assert finished.returncode == -signal.SIGKILL
        (children,) = finished.answers()
        assert not any(map(is_running, children))


def test_forked_ranks_are_killed_if_the_wait_for_them_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def interrupted(process: ForkedProcess) -> None:
        started.append(process.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(ForkedProcess, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(1, ["-m", RANKS, "hang"], timeout_s=60)
    (pid,) = started
    while is_running(pid):
        time.sleep(0.01)


def test_a_module_is_forked_unless_it_must_be_fresh_or_a_variable_is_read_by_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check, too, that no library has set another variable in this process: it would prevent all forks."""

    def are_forked(*arguments: str, fresh: bool = False, **changes: str) -> bool:
        (finished,) = run_ranks(1, list(arguments), timeout_s=60, fresh=fresh, **changes)
        assert finished.returncode == 0, finished.output
        forked: bool = finished.answers()[0]
        return forked

    assert are_forked("-m", RANKS, "forked")
    assert not are_forked("-m", RANKS, "forked", fresh=True)
    assert not are_forked("-m", RANKS, "forked", OMP_NUM_THREADS="2")
    assert not are_forked(RANKS.replace(".", os.sep) + ".py", "forked")
    monkeypatch.setenv("SET_BY_A_TEST", "1")
    assert not are_forked("-m", RANKS, "forked")


def test_a_fork_server_that_has_ended_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = {**launch.environment(), "PYTHONPATH": str(tmp_path)}
    server = launch.ForkServer(broken, str(tmp_path))
    with pytest.raises((RuntimeError, OSError)):
        server.fork(RANKS, [], broken)
    server.close()
