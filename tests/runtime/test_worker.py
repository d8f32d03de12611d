"""Check the worker thread of the CPU lane: order, exceptions, and its end."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from deep_opt_states.runtime.worker import Worker
from tests.launch import REPOSITORY


def test_tasks_run_in_order_on_another_thread() -> None:
    worker = Worker()
    seen: list[tuple[int, int]] = []
    futures = [worker.submit(lambda task=task: seen.append((task, threading.get_ident()))) for task in range(50)]
    for future in futures:
        future.result(timeout=10)
    worker.close()
    assert [task for task, _ in seen] == list(range(50))
    assert {thread for _, thread in seen}.isdisjoint({threading.get_ident()})


def test_the_thread_enters_the_device_before_any_task() -> None:
    entered: list[int] = []
    worker = Worker(lambda: entered.append(threading.get_ident()))
    seen: list[list[int]] = []
    threads: list[int] = []

    def task() -> None:
        seen.append(list(entered))
        threads.append(threading.get_ident())

    for _ in range(3):
        worker.submit(task).result(timeout=10)
    worker.close()
    assert seen == [entered] * 3
    assert entered == threads[:1]


def test_worker_whose_thread_cannot_enter_the_device_raises_in_its_constructor() -> None:
    def refuse() -> None:
        raise RuntimeError("CUDA error: invalid device ordinal")

    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        Worker(refuse)


def test_an_exception_comes_out_of_the_future_and_the_thread_lives_on() -> None:
    worker = Worker()
    with pytest.raises(ZeroDivisionError):
        worker.submit(lambda: 1 // 0).result(timeout=10)
    assert worker.submit(lambda: None).result(timeout=10) is None
    worker.close()


def test_worker_without_references_ends_its_thread_and_keeps_no_task_alive() -> None:
    class Big:
        pass

    big = Big()
    gone = weakref.ref(big)
    worker = Worker()
    worker.submit(lambda big=big: None).result(timeout=10)
    del big
    worker.submit(lambda: None).result(timeout=10)
    gc.collect()
    assert gone() is None
    before = threading.active_count()
    del worker
    gc.collect()
    assert threading.active_count() == before - 1


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_task_with_the_last_reference_to_its_worker_ends_the_thread() -> None:
    class Task:
        def __init__(self, worker: Worker) -> None:
            self.worker = worker

        def __call__(self) -> None:
            dropped.wait(timeout=10)
            threads.append(threading.current_thread())
            del self.worker

    dropped = threading.Event()
    threads: list[threading.Thread] = []
    worker = Worker()
    done = worker.submit(Task(worker))
    del worker
    dropped.set()
    done.result(timeout=10)
    threads[0].join(timeout=10)
    assert not threads[0].is_alive()


@pytest.mark.parametrize("task", ["pass", "threading.Event().wait()"])
def test_a_process_ends_with_a_worker_idle_or_stuck(task: str) -> None:
    code = (
        "import threading\nfrom deep_opt_states.runtime.worker import Worker\n"
        f"worker = Worker()\ndef task():\n    {task}\nworker.submit(task)\nprint('end')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_a_worker_whose_thread_was_ended_runs_tasks_in_the_caller() -> None:
    """Check the order in which the garbage collector ends an engine: the thread first, and then its update."""
    worker = Worker()
    threads: list[threading.Thread] = []
    worker.submit(lambda: threads.append(threading.current_thread())).result()
    worker.close()
    worker.submit(lambda: threads.append(threading.current_thread())).result(timeout=10)
    assert threads[0] is not threads[1]
    assert threads[1] is threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        worker.submit(lambda: 1 // 0).result(timeout=10)
