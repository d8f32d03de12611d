"""Keeps the threads of this process off the cores of the update, whose threads pin themselves.

PyTorch launches its work from the main thread and from autograd's. All threads that run are moved, and a thread that is
started later inherits from the one that starts it: autograd's threads, NCCL's.

A forked process does not inherit: it may use all CPUs that its parent could use before, as without the plugin. Forked
processes load data, often many of them, and would slow each other down on the few launch cores, and the launching
threads with them. They may run on the update's cores now, from which the system moves them to idle ones, since the
update's threads are pinned there and they are not. A process that is started by another program (``subprocess``, the
``spawn`` and ``forkserver`` methods of multiprocessing) inherits: nothing of ours runs in it before it does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch


class AffinityError(RuntimeError):
    """The system does not let this process say where its threads run."""


@dataclass(frozen=True)
class _Moved:
    """A thread that could run on ``before``, and can on ``now`` since it was moved."""

    before: frozenset[int]
    now: frozenset[int]


@dataclass
class _Process:
    """Affinity is the process's, however many engines it has: the last binding counts, and after all of them
    everything is as it was."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    bindings: list[LaunchBinding] = field(default_factory=list)
    moved: dict[int, _Moved] = field(default_factory=dict)
    """By the kernel's thread id."""
    torch_threads_before: int | None = None


_process = _Process()


class LaunchBinding:
    """Until ``release()``, the threads of this process run on the logical CPUs ``cpus``; what it forks does not.

    A thread that was bound before stays on those of its CPUs that are among them, if any; one that binds itself
    afterwards is left alone. PyTorch's operations use no more threads than there are ``cpus``: more would wait for one
    another. Raises ``AffinityError``, and leaves everything as it was, where threads cannot be moved.
    """

    def __init__(self, cpus: Collection[int]) -> None:
        assert cpus
        self.cpus = frozenset(cpus)
        with _process.lock:
            _process.bindings.append(self)
            try:
                _move_threads()
            except OSError as error:
                _process.bindings.remove(self)
                _move_threads()
                raise AffinityError(
                    f"A process must be free to choose the CPUs that its threads run on; choosing {sorted(self.cpus)}, "
                    f'found {error}.\nSet "bind_cores": false.'
                ) from error
            _limit_torch_threads()

    def release(self) -> None:
        with _process.lock:
            if self in _process.bindings:
                _process.bindings.remove(self)
                _move_threads()
                _limit_torch_threads()


def allowed_cpus() -> frozenset[int]:
    """The logical CPUs that this process may use, also while a binding keeps its threads off some of them."""
    with _process.lock:
        moved = _process.moved.get(os.getpid())
        return moved.before if moved else frozenset(os.sched_getaffinity(os.getpid()))


def _move_threads() -> None:
    target = _process.bindings[-1].cpus if _process.bindings else None
    first = target is not None and not _process.moved
    # A thread that was started since the last move is where the thread was that started it, or has bound itself.
    inherited = _moved_by_cpus(os.getpid())
    seen: set[int] = set()
    # One that is not moved yet can start another meanwhile.
    while unseen := {int(task.name) for task in Path("/proc/self/task").iterdir()} - seen:
        for thread in sorted(unseen):
            try:
                _move(thread, target, inherited, first)
            except ProcessLookupError:
                _process.moved.pop(thread, None)
        seen |= unseen
    if target is None:
        _process.moved.clear()


def _moved_by_cpus(main_thread: int) -> dict[frozenset[int], _Moved]:
    """Return the moved threads by where they run now; of several there, the main thread if it is among them."""
    main = _process.moved.get(main_thread)
    return {moved.now: moved for moved in _process.moved.values()} | ({main.now: main} if main else {})


def _restore_in_forked_child() -> None:
    """Give the only thread of a forked child the CPUs that the thread which forked it had before it was moved."""
    # The kernel's ids are the parent's; a process's is that of its main thread.
    moved = _moved_by_cpus(os.getppid()).get(frozenset(os.sched_getaffinity(0)))
    # Another thread of the parent may hold the lock, which nobody would release here.
    _process.lock = threading.Lock()
    _process.bindings = []
    _process.moved = {}
    _process.torch_threads_before = None
    if moved is not None:
        # A container's CPUs may have been taken away meanwhile; then the child stays where it is.
        with suppress(OSError):
            os.sched_setaffinity(0, moved.before)


os.register_at_fork(after_in_child=_restore_in_forked_child)


def _move(thread: int, target: frozenset[int] | None, inherited: dict[frozenset[int], _Moved], first: bool) -> None:
    found = frozenset(os.sched_getaffinity(thread))
    moved = _process.moved.get(thread) or inherited.get(found) or (_Moved(found, found) if first else None)
    if moved is None or found != moved.now:
        return
    now = moved.before if target is None else moved.before & target or target
    os.sched_setaffinity(thread, now)
    _process.moved[thread] = _Moved(moved.before, now)


def _limit_torch_threads() -> None:
    if _process.torch_threads_before is None:
        _process.torch_threads_before = torch.get_num_threads()
    threads = _process.torch_threads_before
    if _process.bindings:
        threads = min(threads, len(_process.bindings[-1].cpus))
    else:
        _process.torch_threads_before = None
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
