"""Train with stock and with the plugin in each of the ``drills``, and answer with the ranks' exit codes and outputs.

Arguments: a folder, and the names of the drills. The ranks are forked after the imports, which are slow.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deep_opt_states.profiler import cache
from deep_opt_states.zero.checkpoint_saving import CheckpointNotSaved
from deep_opt_states.zero.internals.agreement import RanksDisagree
from tests.fork_server import import_all
from tests.launch import answer
from tests.model.profiles import profile
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import Block, Record, closing_engine, collect, differences, run_variant
from tests.zero.rank_group import Group

TIMEOUT_S = 150
OTHER_USER = 54_321
"""A user without a name or a home folder, as in many containers."""

UNREADABLE = ("/sys", "/proc/self/numa_maps", "/proc/self/cgroup", "/proc/cpuinfo")


def case_of(ranks: int) -> Case:
    return Case(name="drill", blocks=(STRIDE_2,), world_size=ranks, steps=3, clip=0.5)


def compare(block: Block, ranks: int = 1) -> None:
    found = differences(run_variant(case_of(ranks), None), run_variant(case_of(ranks), block))
    assert found == [], found


def lock_little() -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 * 1024, 64 * 1024))
    compare(STRIDE_2)


def use_one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    compare(STRIDE_2)


def read_nothing_of_the_kernel() -> None:
    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(UNREADABLE):
            raise PermissionError(13, "Permission denied", arguments[0])

    sys.addaudithook(refuse)
    with pytest.raises(PermissionError):
        Path("/proc/self/numa_maps").read_text()
    compare(STRIDE_2)


@contextmanager
def home(folder: Path | None) -> Iterator[None]:
    """Become a user whose home is ``folder``, if there is one, and measure no profile, which takes long."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        os.environ.pop(name, None)
    if folder is not None:
        os.environ["HOME"] = str(folder)
    if os.getuid() == 0:
        os.setuid(OTHER_USER)
    with mock.patch.object(cache, "measure", return_value=profile()) as measure:
        yield
    measure.assert_called()


def have_no_home() -> None:
    with home(None):
        compare({})


def have_a_read_only_home(folder: Path) -> None:
    folder.mkdir(mode=0o500)
    with home(folder):
        compare({})


def share_a_home(folder: Path) -> None:
    """Train with the home of a user who alone may read and write the cache of profiles."""
    with mock.patch.object(cache, "fingerprint", return_value="shared"):
        cached = folder / ".cache/deep_opt_states/shared.json"
        cached.parent.mkdir(parents=True)
        cached.write_text(profile().to_json())
        cached.chmod(0)
        cached.parent.chmod(0o500)
        with home(folder):
            compare({})


def train(engine: Any, first: int, steps: int) -> None:
    for step in range(first, steps):
        x, target = batch(case_of(dist.get_world_size()), dist.get_rank(), step, torch.bfloat16)
        engine.backward(engine(x, target, None, 1.0))
        engine.step()


def exhaust_memory() -> None:
    """Run out of host memory in a forward, and repeat the batch when there is memory again."""
    records = []
    for block in (None, STRIDE_2):
        with closing_engine(case_of(1), block) as engine:
            train(engine, 0, 1)
            limits = resource.getrlimit(resource.RLIMIT_AS)
            in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            hook = engine.module.layers[2].register_forward_pre_hook(lambda *_: torch.empty(2**30, dtype=torch.uint8))
            resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**28, limits[1]))
            with pytest.raises(RuntimeError, match="can't allocate memory"):
                train(engine, 1, 2)
            resource.setrlimit(resource.RLIMIT_AS, limits)
            hook.remove()
            train(engine, 1, 3)
            records.append(Record())
            collect(engine.optimizer, records[-1])
    assert differences(*records) == []


def fill_the_disk(disk: Path) -> None:
    """Save on a full disk, and again on one with space. Resume with stock from what was saved then."""
    saved, filler = disk / "saved", disk / f"filler {dist.get_rank()}"
    with closing_engine(case_of(2), STRIDE_2) as engine:
        train(engine, 0, 1)
        engine.save_checkpoint(str(saved))
        train(engine, 1, 2)
        with suppress(OSError):
            filler.write_bytes(bytes(2**21))
        dist.barrier()
        with pytest.raises((CheckpointNotSaved, RanksDisagree)) as caught:
            engine.save_checkpoint(str(saved))
        assert (saved / "latest").read_text() == "global_step1"
        print(f"REFUSED {caught.value}", flush=True)
        dist.barrier()
        filler.unlink(missing_ok=True)
        dist.barrier()
        engine.save_checkpoint(str(saved))
    with closing_engine(case_of(2), None) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(str(disk / "stock"))
    records = []
    for folder in ("stock", "saved"):
        with closing_engine(case_of(2), None) as engine:
            engine.load_checkpoint(str(disk / folder))
            train(engine, 2, 3)
            records.append(Record())
            collect(engine.optimizer, records[-1])
    assert differences(*records) == []


@dataclass(frozen=True)
class Drill:
    """A function that each of ``ranks`` ranks runs, and the megabytes of a file system that is mounted before."""

    run: Callable[[], None]
    ranks: int = 1
    mounted: tuple[Path, int] | None = None


def drills(folder: Path, homes: Path) -> dict[str, Drill]:
    disk = folder / "disk"
    return {
        "ulimit -l 64": Drill(lock_little),
        "one core": Drill(use_one_core),
        "/sys is unreadable": Drill(read_nothing_of_the_kernel),
        "no home": Drill(have_no_home),
        "a read-only home": Drill(partial(have_a_read_only_home, homes / "read-only")),
        "a shared home": Drill(partial(share_a_home, homes / "shared")),
        "host memory is exhausted": Drill(exhaust_memory),
        "64 MB of /dev/shm": Drill(partial(compare, STRIDE_2, 2), ranks=2, mounted=(Path("/dev/shm"), 64)),
        "the disk is full": Drill(partial(fill_the_disk, disk), ranks=2, mounted=(disk, 1)),
    }


def mount(folder: Path, megabytes: int) -> None:
    """Put an empty file system at ``folder``, which only this process and its children see."""
    folder.mkdir(exist_ok=True)
    libc, new_namespace, private_recursively = ctypes.CDLL(None), 0x20000, 0x44000
    assert libc.unshare(new_namespace) == 0
    assert libc.mount(b"none", b"/", None, private_recursively, None) == 0
    assert libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={megabytes}m".encode()) == 0


def main(folder: Path, names: list[str]) -> None:
    import_all()
    with tempfile.TemporaryDirectory() as homes:
        # Another user than root must reach the homes.
        os.chmod(homes, 0o755)
        groups = {}
        for name in names:
            drill = drills(folder, Path(homes))[name]
            if drill.mounted is not None:
                mount(*drill.mounted)
            groups[name] = Group(drill.run, drill.ranks, folder / name.replace("/", " "))
        for name, group in groups.items():
            codes = group.codes(TIMEOUT_S)
            answer({"drill": name, "codes": codes, "outputs": [rank.output.read_text() for rank in group.ranks]})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
