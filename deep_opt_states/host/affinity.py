"""Keep the threads of this process off the cores of the update, whose own threads pin themselves.

PyTorch launches its work from the main thread and from autograd's threads. All running threads are moved. A thread that
is started later, such as autograd's and NCCL's, inherits the affinity of the thread that starts it.

A forked process does not inherit the new affinity: it may use all CPUs that its parent could use before, as without
the plugin. Forked processes usually load data. Many of them on the few launch cores would slow down each other and the
launching threads. Instead they may run on the update's cores, too. The system moves them to idle cores when necessary,
since they are not pinned and the update's threads are. A process that starts as another program (``subprocess``, and
the ``spawn`` and ``forkserver`` methods of multiprocessing) inherits the new affinity: it inherits before any code of
this package runs in it.
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
    """The error for a system that does not let this process choose the CPUs of its threads."""


@dataclass(frozen=True)
class _Moved:
    """A moved thread, which could run on the CPUs ``before`` and may now run on the CPUs ``now``."""

    before: frozenset[int]
    now: frozenset[int]


@dataclass
class _Process:
    """The bindings of this process. There may be several, one per engine: the latest one applies.

    After all bindings have been released, every thread has its original affinity.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    bindings: list[LaunchBinding] = field(default_factory=list)
    moved: dict[int, _Moved] = field(default_factory=dict)
    """The moved threads, by the kernel's thread id."""
    torch_threads_before: int | None = None


_process = _Process()


class LaunchBinding:
    """A restriction of all threads of this process to the logical CPUs ``cpus``, until ``release()``.

    Processes that it forks are not restricted. A thread that was bound before stays on those of its CPUs that are in
    ``cpus``, if there are any. A thread that binds itself later is not moved any more. PyTorch's operations use at most
    as many threads as there are ``cpus``: more threads would wait for each other. If threads cannot be moved, the
    constructor restores everything and raises ``AffinityError``.
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
                    f"A process must be able to choose the CPUs of its threads; choosing {sorted(self.cpus)}, "
                    f'found {error}.\nSet "bind_cores": false.'
                ) from error
            _limit_torch_threads()

    def release(self) -> None:
        """Remove the restriction. The binding that was made before it, if any, applies again."""
        with _process.lock:
            if self in _process.bindings:
                _process.bindings.remove(self)
                _move_threads()
                _limit_torch_threads()


def allowed_cpus() -> frozenset[int]:
    """Return the logical CPUs that this process may use, including those that a binding keeps its threads off."""
    with _process.lock:
        moved = _process.moved.get(os.getpid())
        return moved.before if moved else frozenset(os.sched_getaffinity(os.getpid()))


def _move_threads() -> None:
    """Move all threads to the CPUs of the latest binding, or back to their own if there is none."""
    target = _process.bindings[-1].cpus if _process.bindings else None
    first = target is not None and not _process.moved
    # A thread that was started since the last move has the affinity of the thread that started it, or has bound itself.
    inherited = _moved_by_cpus(os.getpid())
    seen: set[int] = set()
    # A thread that is not moved yet can start another one in the meantime, so repeat until there is no new one.
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
    """Return one moved thread for each set of CPUs, preferably the main thread."""
    main = _process.moved.get(main_thread)
    return {moved.now: moved for moved in _process.moved.values()} | ({main.now: main} if main else {})


def _restore_in_forked_child() -> None:
    """Give the only thread of a forked child the CPUs that the forking thread had before it was moved."""
    # The recorded thread ids are those of the parent. The id of a process is that of its main thread.
    moved = _moved_by_cpus(os.getppid()).get(frozenset(os.sched_getaffinity(0)))
    # Another thread of the parent may hold the lock. It does not exist in the child and would never release it.
    _process.lock = threading.Lock()
    _process.bindings = []
    _process.moved = {}
    _process.torch_threads_before = None
    if moved is not None:
        # The CPUs may have been removed from the container in the meantime. Then the child keeps its affinity.
        with suppress(OSError):
            os.sched_setaffinity(0, moved.before)


os.register_at_fork(after_in_child=_restore_in_forked_child)


def _move(thread: int, target: frozenset[int] | None, inherited: dict[frozenset[int], _Moved], first: bool) -> None:
    """Move one thread to ``target``, or back to its own CPUs if that is None. Skip a thread that has bound itself."""
    found = frozenset(os.sched_getaffinity(thread))
    moved = _process.moved.get(thread) or inherited.get(found) or (_Moved(found, found) if first else None)
    if moved is None or found != moved.now:
        return
    now = moved.before if target is None else moved.before & target or target
    os.sched_setaffinity(thread, now)
    _process.moved[thread] = _Moved(moved.before, now)


def _limit_torch_threads() -> None:
    """Limit PyTorch's intra-op threads to the CPUs of the latest binding, or restore their number."""
    if _process.torch_threads_before is None:
        _process.torch_threads_before = torch.get_num_threads()
    threads = _process.torch_threads_before
    if _process.bindings:
        threads = min(threads, len(_process.bindings[-1].cpus))
    else:
        _process.torch_threads_before = None
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
