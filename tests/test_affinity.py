"""Test that the threads of this process are moved and restored. Some tests need a machine with two CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count

import pytest
import torch

from deep_opt_states.host import cores
from deep_opt_states.host.cores import AffinityError, LaunchBinding, allowed_cpus
from tests.forked_child import exit_code_of_child

ALLOWED = frozenset(os.sched_getaffinity(0))
LOW, HIGH = frozenset({min(ALLOWED)}), frozenset({max(ALLOWED)})
two_cpus = pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two CPUs to move threads between")


@pytest.fixture(autouse=True)
def _everything_is_restored() -> Iterator[None]:
    yield
    assert cores._process.bindings == []
    assert cores._process.moved == {}
    assert os.sched_getaffinity(0) == ALLOWED


@contextmanager
def parked(first: Callable[[], object] = lambda: None) -> Iterator[int]:
    ready, end = threading.Event(), threading.Event()

    def run() -> None:
        first()
        ready.set()
        end.wait()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    assert thread.native_id is not None
    try:
        yield thread.native_id
    finally:
        end.set()
        thread.join()


def bind_low() -> None:
    os.sched_setaffinity(0, LOW)


@two_cpus
def test_running_threads_are_moved_and_restored_and_later_threads_and_programs_inherit() -> None:
    with parked() as thread, parked(bind_low) as bound:
        binding = LaunchBinding(HIGH)
        assert [os.sched_getaffinity(tid) for tid in (0, thread, bound)] == [HIGH] * 3
        assert allowed_cpus() == ALLOWED
        with parked() as later:
            assert os.sched_getaffinity(later) == HIGH
            code = "import os; print(sorted(os.sched_getaffinity(0)))"
            child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            assert child.stdout.strip() == str(sorted(HIGH))
            binding.release()
            assert os.sched_getaffinity(later) == ALLOWED
        assert [os.sched_getaffinity(tid) for tid in (0, thread, bound)] == [ALLOWED, ALLOWED, LOW]
        binding.release()
        assert allowed_cpus() == ALLOWED


def has_cpus(cpus: frozenset[int]) -> int:
    return 0 if (frozenset(os.sched_getaffinity(0)), allowed_cpus()) == (cpus, cpus) else 1


@two_cpus
def test_a_forked_process_may_use_all_cpus_of_its_parent_or_of_a_thread_that_bound_itself() -> None:
    """Check forks of a thread, as of one that loads data. The parent's threads keep their affinity."""
    codes: list[int] = []

    def fork(cpus: frozenset[int]) -> None:
        codes.append(exit_code_of_child(partial(has_cpus, cpus)))

    first = LaunchBinding(HIGH)
    with parked():
        second = LaunchBinding(LOW)
    with parked(lambda: fork(ALLOWED)):
        assert os.sched_getaffinity(0) == LOW
    second.release()
    with parked(lambda: (bind_low(), fork(LOW))):
        first.release()
    fork(ALLOWED)
    assert codes == [0, 0, 0]


@two_cpus
def test_a_forked_process_can_bind_and_release_while_its_parent_is_binding() -> None:
    inherited = LaunchBinding(HIGH)

    def bind() -> int:
        inherited.release()
        own = LaunchBinding(LOW)
        bound = os.sched_getaffinity(0) == LOW
        own.release()
        return 0 if bound and os.sched_getaffinity(0) == ALLOWED else 1

    with cores._process.lock:
        assert exit_code_of_child(bind) == 0
    inherited.release()


@two_cpus
@pytest.mark.parametrize("first_in_first_out", [True, False])
def test_of_two_bindings_the_latest_is_in_force(first_in_first_out: bool) -> None:
    with parked() as thread, parked() as early:
        first = LaunchBinding(HIGH)
        os.sched_setaffinity(early, LOW)
        second = LaunchBinding(LOW)
        assert os.sched_getaffinity(thread) == os.sched_getaffinity(0) == LOW
        assert allowed_cpus() == ALLOWED
        (first if first_in_first_out else second).release()
        assert os.sched_getaffinity(thread) == os.sched_getaffinity(0) == (LOW if first_in_first_out else HIGH)
        assert os.sched_getaffinity(early) == LOW
        (second if first_in_first_out else first).release()
        assert os.sched_getaffinity(thread) == ALLOWED
        assert os.sched_getaffinity(early) == LOW, "it has bound itself in the meantime"


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, frozenset[int]]]:
    """Replace the kernel by one with 8 CPUs, and yield the affinity of each thread; one that has ended has none."""
    masks = defaultdict(lambda: frozenset(range(8)))

    def get(thread: int) -> frozenset[int]:
        if not masks[thread or os.getpid()]:
            raise ProcessLookupError
        return masks[thread or os.getpid()]

    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", get)
        patch.setattr(os, "sched_setaffinity", lambda thread, cpus: masks.update({thread or os.getpid(): {*cpus}}))
        yield masks


def test_a_bound_thread_keeps_the_cpus_that_the_binding_allows_and_one_that_ends_is_ignored(
    masks: dict[int, frozenset[int]],
) -> None:
    """Check also that PyTorch uses at most one thread per CPU of the binding."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(5)
    with parked() as near, parked() as far, parked() as ended, parked() as ending:
        masks |= {near: frozenset({1, 2, 3}), far: frozenset({0, 1}), ended: frozenset()}
        binding = LaunchBinding({2, 3, 4})
        found = [masks[tid] for tid in (os.getpid(), near, far, ending)]
        assert found == [{2, 3, 4}, {2, 3}, {2, 3, 4}, {2, 3, 4}]
        assert torch.get_num_threads() == 3
        masks[ending] = frozenset()
        binding.release()
        assert [masks[tid] for tid in (os.getpid(), near, far)] == [set(range(8)), {1, 2, 3}, {0, 1}]
        assert masks[ending] == masks[ended] == set()
        assert torch.get_num_threads() == 5
    torch.set_num_threads(num_threads)


@pytest.mark.P6
@pytest.mark.parametrize("refused", [range(1, 1000), {2}], ids=["all", "the second"])
def test_if_a_thread_cannot_be_moved_an_error_is_raised_and_no_thread_is_moved(
    refused: Container[int], masks: dict[int, frozenset[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    move, moves = os.sched_setaffinity, count(1)

    def refuse(thread: int, cpus: set[int]) -> None:
        if next(moves) in refused:
            raise PermissionError(1, "Operation not permitted")
        move(thread, cpus)

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with parked() as thread:
        with pytest.raises(
            AffinityError, match=r"choosing \[6, 7\], found .*not permitted.*\nSet \"bind_cores\": false"
        ):
            LaunchBinding({6, 7})
        assert masks[os.getpid()] == masks[thread] == set(range(8))
