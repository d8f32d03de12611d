"""Log the long waits of a start: for a build or its lock, other ranks, page-locking, a profile."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist
from wrapt import wrap_function_wrapper

from deep_opt_states import log

FIRST_S = 20.0
"""The seconds after which a wait is logged. Each further line doubles its seconds."""

ANNOUNCED_S = 10.0
"""The seconds between a rank's first wait in ``init_distributed`` and the names of missing ranks."""

THREAD = "deep_opt_states-waiting"

CALLED_BY_STEPS = ("waiting.py", "agreement.py", "ranks.py")
"""The files whose functions wait for other ranks on behalf of a step."""


@contextmanager
def waiting(step: str | Callable[[], str], explain: Callable[[], str | None] = lambda: "") -> Iterator[None]:
    """Log ``step`` if the body takes long, as a warning if ``explain`` returns a text, and not if it returns None."""
    ended = threading.Event()
    threading.Thread(target=_watch, args=(step, explain, ended.wait), name=THREAD, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _watch(
    step: str | Callable[[], str], explain: Callable[[], str | None], has_ended: Callable[[float], bool]
) -> None:
    began_s, pause_s, waited_s, was_logged = time.monotonic(), FIRST_S, 0.0, False
    name = "a wait"
    while not has_ended(pause_s):
        waited_s = pause_s = waited_s + pause_s
        text: str | None = ""
        # A wait must not fail because of its explanation.
        with suppress(Exception):
            name = step() if callable(step) else step
            text = explain()
        if text is not None:
            was_logged = True
            tell = log.warn_this_rank if text else log.info_this_rank
            tell(f"{name}: {waited_s:.0f} s so far. {text}".rstrip())
    if was_logged:
        log.info_this_rank(f"{name}: ended after {time.monotonic() - began_s:.0f} s")


def watch_loader(loader: Any) -> None:
    """Make ``load`` of ``loader``, PyTorch's module ``cpp_extension``, log the state of its lock when it takes long."""

    def load(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        # DeepSpeed loads some extensions before it knows a config: the block cannot decide.
        if "deepspeed" not in sys.modules:
            return wrapped(*args, **kwargs)
        name = args[0] if args else kwargs.get("name", "")

        def explain() -> str | None:
            folder = kwargs.get("build_directory") or loader._get_build_directory(name, False)
            return _explain_lock(Path(folder) / "lock", may_be_stale=may_be_stale(loader))

        with waiting(f"compiling or loading the extension {name}", explain):
            return wrapped(*args, **kwargs)

    wrap_function_wrapper(loader, "load", load)


def may_be_stale(loader: Any) -> bool:
    """Return whether a killed build leaves a lock that blocks. Since PyTorch 2.14, only the released file stays."""
    return not hasattr(loader, "FileLock")


def _explain_lock(lock: Path, *, may_be_stale: bool = True) -> str | None:
    processes = holders([lock])[lock]
    # The ranks of a node wait for the same build, and one of them says so.
    if os.environ.get("LOCAL_RANK", "0") != "0" and os.getpid() not in processes:
        return None
    if not lock.exists() or not may_be_stale or os.getpid() in processes:
        return ""
    age = timedelta(seconds=int(time.time() - lock.stat().st_mtime))
    if processes:
        return f"Process {', '.join(map(str, processes))} has been building it for {age}."
    return (
        f"Its lock {lock} is {age} old, and no process of this user on this machine has it open: a build that was "
        f"killed has left it. Unless another user or machine is building there now: rm {shlex.quote(str(lock))}"
    )


def holders(locks: Iterable[Path]) -> dict[Path, list[int]]:
    """Return the processes of this user on this machine that have each of ``locks`` open."""
    found: dict[Path, list[int]] = {lock: [] for lock in locks}
    for file in Path("/proc").glob("[0-9]*/fd/*") if found else ():
        for lock in found:
            with suppress(OSError):
                if os.path.samefile(file, lock):
                    found[lock].append(int(file.parts[2]))
    return found


_collectives = count()


def waiting_for_ranks() -> AbstractContextManager[None]:
    """Log which ranks have not come to the collective in the body, if that takes long, on the first rank that has."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return nullcontext()
    number = next(_collectives)
    # The collective itself reports a store that is gone.
    with suppress(RuntimeError):
        dist.distributed_c10d._get_default_store().set(_key(number, dist.get_rank()), "here")
    return waiting("waiting for other ranks", partial(_missing_ranks, number, threading.get_ident()))


def _key(number: int, rank: int) -> str:
    return f"deep_opt_states/{number}/{rank}"


def _missing_ranks(number: int, thread: int) -> str | None:
    # A clone, because the waiting thread may hold the lock of its store in the first collective of NCCL.
    store: Any = dist.distributed_c10d._get_default_store()
    missing = _without_key(store.clone(), number, dist.get_rank(), dist.get_world_size())
    if missing is None:
        return None
    stack = traceback.extract_stack(sys._current_frames()[thread])
    ours = [frame for frame in stack if Path(__file__).parent in Path(frame.filename).parents]
    step = [frame for frame in ours if Path(frame.filename).name not in CALLED_BY_STEPS][-1]
    return f"Missing in {step.name} ({Path(step.filename).name}:{step.lineno}): rank {missing or 'none'}."


def _without_key(store: Any, number: int, rank: int, ranks: int) -> str | None:
    """Return the ranks that have not come to a collective; None if one before ``rank`` has, which names them."""
    here = [store.check([_key(number, each)]) for each in range(ranks)]
    if any(here[:rank]):
        return None
    return ", ".join(str(each) for each, is_here in enumerate(here) if not is_here)


def watch_rendezvous(comm: Any) -> None:
    """Make ``init_distributed`` of ``comm``, DeepSpeed's module, log which ranks are missing when it takes long."""

    def init_distributed(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        with waiting("waiting for other ranks in init_distributed", _missing_in_rendezvous):
            return wrapped(*args, **kwargs)

    wrap_function_wrapper(comm, "init_distributed", init_distributed)


def _missing_in_rendezvous() -> str | None:
    """Return the ranks that are not known to wait, according to the store that rank 0 or the launcher keeps."""
    rank, ranks, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    host = os.environ["MASTER_ADDR"]
    try:
        # PyTorch's store would log a long traceback.
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        # DeepSpeed compiles its collectives before rank 0 listens.
        why = "look at its output" if rank else "it may still compile, or MASTER_ADDR is not this host"
        return f"Nothing answers at {host}:{port}, where rank 0 must listen: {why}."
    store = dist.TCPStore(host, port, timeout=timedelta(seconds=5), wait_for_workers=False)  # type: ignore[attr-defined]
    store.set(_key(-1, rank), "here")
    # Ranks that started a little later announce themselves a little later.
    time.sleep(ANNOUNCED_S)
    missing = _without_key(store, -1, rank, ranks)
    return missing and f"Missing: rank {missing}. Look at its output, and whether its node runs."
