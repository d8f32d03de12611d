"""Check that training with too little of something is bit-identical to stock, or raises an error with the remedy."""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout, suppress
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deep_opt_states.profiler import cache
from deep_opt_states.zero.checkpoint_saving import CheckpointNotSaved
from deep_opt_states.zero.internals.agreement import RanksDisagree
from tests.fork_server import freeze_imported
from tests.forked_child import exit_code_of_child
from tests.model.profiles import profile
from tests.ranks import on_ranks, ranks
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import Block, Record, assert_same_bits, closing_engine, recorded, run_variant
from tests.zero.process_group import process_group

UNREADABLE = ("/sys", "/proc/self/numa_maps", "/proc/self/cgroup", "/proc/cpuinfo")
NEEDS_MOUNT = pytest.mark.skipif(os.geteuid() != 0, reason="needs a user who may mount file systems")
pytestmark = pytest.mark.P6


def case_of(ranks: int) -> Case:
    return Case(name="drill", blocks=(STRIDE_2,), world_size=ranks, steps=3, clip=0.5)


def compare(block: Block, ranks: int = 1) -> None:
    assert_same_bits(run_variant(case_of(ranks), None), run_variant(case_of(ranks), block))


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


def train_at_home(folder: Path | None = None) -> str:
    """Train as a user whose home is ``folder``, or who has no home, as in many containers, and return the output."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        os.environ.pop(name, None)
    if folder is not None:
        os.environ["HOME"] = str(folder)
    user, _, saved_user = os.getresuid()
    if user == 0:
        os.setresuid(54_321, 54_321, 0)
    measured = mock.patch.object(cache, "measure", return_value=profile())
    with measured as measure, redirect_stdout(StringIO()) as output:
        compare({})
    measure.assert_called()
    os.setresuid(*[saved_user] * 3)
    return output.getvalue()


def share_a_home(folder: Path) -> str:
    with mock.patch.object(cache, "fingerprint", return_value="shared"):
        cached = folder / ".cache/deep_opt_states/shared.json"
        cached.parent.mkdir(parents=True)
        cached.write_text(profile().to_json())
        cached.chmod(0)
        cached.parent.chmod(0o500)
        return train_at_home(folder)


def have_a_read_only_home(folder: Path) -> str:
    folder.mkdir(mode=0o500)
    return train_at_home(folder)


def train(engine: Any, first: int, steps: int) -> None:
    for step in range(first, steps):
        x, target = batch(case_of(dist.get_world_size()), dist.get_rank(), step, torch.bfloat16)
        engine.backward(engine(x, target, None, 1.0))
        engine.step()


def record_of(engine: Any, first: int) -> Record:
    train(engine, first, 3)
    return recorded(engine)


def exhaust_memory() -> None:
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
            records.append(record_of(engine, 1))
    assert_same_bits(*records)


def fill_the_disk(disk: Path) -> str:
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
            records.append(record_of(engine, 2))
    assert_same_bits(*records)
    return str(caught.value)


@contextmanager
def mounted(folder: Path, megabytes: int, shared: Path) -> Iterator[None]:
    """Run the block in a process group of ranks that alone see an empty file system at ``folder``."""
    libc, new_namespace, private_recursively = ctypes.CDLL(None), 0x20000, 0x44000
    leader = shared / "leader"
    if os.environ["RANK"] == "0":
        assert libc.unshare(new_namespace) == 0
        assert libc.mount(b"none", b"/", None, private_recursively, None) == 0
        assert libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={megabytes}m".encode()) == 0
        partial_file = leader.with_suffix(".partial")
        partial_file.write_text(str(os.getpid()))
        partial_file.rename(leader)
    else:
        while not leader.exists():
            time.sleep(0.01)
        with open(f"/proc/{leader.read_text()}/ns/mnt") as namespace:
            assert libc.setns(namespace.fileno(), new_namespace) == 0
    with process_group():
        yield


@pytest.mark.parametrize("drill", [lock_little, use_one_core, read_nothing_of_the_kernel, exhaust_memory])
def test_training_with_too_little_of_something_is_bit_identical_to_stock(drill: Callable[[], None]) -> None:
    on_ranks(1, drill)


def test_a_profile_that_this_user_cannot_cache_is_one_line_of_the_log_per_start() -> None:
    refused = "Set XDG_CACHE_HOME to a folder that can be written"
    # Another user than root must reach the homes.
    with tempfile.TemporaryDirectory() as homes:
        os.chmod(homes, 0o755)
        for drill, reason in (
            (train_at_home, "this user has no home folder, and XDG_CACHE_HOME is not set"),
            (partial(have_a_read_only_home, Path(homes, "read-only")), refused),
            (partial(share_a_home, Path(homes, "shared")), refused),
        ):
            (output,) = on_ranks(1, drill)
            (line,) = (line for line in output.splitlines() if "The hardware profile is not cached" in line)
            assert reason in line


@NEEDS_MOUNT
def test_training_with_64_mb_of_shared_memory_is_bit_identical_to_stock(tmp_path: Path) -> None:
    on_ranks(2, compare, STRIDE_2, 2, group=partial(mounted, Path("/dev/shm"), 64, tmp_path))


@NEEDS_MOUNT
def test_a_full_disk_is_an_error_of_all_ranks_with_the_file_and_the_space_and_latest_stays(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    for refused in on_ranks(2, fill_the_disk, disk, group=partial(mounted, disk, 1, tmp_path)):
        for part in ("global_step2", "with 0 kB and ", "Free space there, or save to another folder"):
            assert part in refused


@ranks(2)
def test_all_ranks_raise_if_latest_or_a_16_bit_model_cannot_be_written(tmp_path: Path) -> None:
    is_first = dist.get_rank() == 0
    error, text = (CheckpointNotSaved, "No space left") if is_first else (RanksDisagree, "rank 0: .*No space left")

    def full(owner: Any, name: str) -> AbstractContextManager[object]:
        refused = OSError(errno.ENOSPC, "No space left on device")
        return mock.patch.object(owner, name, side_effect=refused) if is_first else nullcontext()

    with closing_engine(case_of(2), STRIDE_2) as engine:
        engine._config.zero_config.gather_16bit_weights_on_model_save = True
        train(engine, 0, 1)
        engine.save_checkpoint(str(tmp_path))
        train(engine, 1, 2)
        with full(Path, "write_text"), pytest.raises(error, match=text):
            engine.save_checkpoint(str(tmp_path))
        assert (tmp_path / "latest").read_text() == "global_step1"
        with full(engine.checkpoint_engine, "save"), pytest.raises(error, match=text):
            engine.save_16bit_model(str(tmp_path))
        engine.save_checkpoint(str(tmp_path))
        assert engine.save_16bit_model(str(tmp_path))
        assert (tmp_path / "latest").read_text() == "global_step2"


def test_the_number_of_omp_threads_does_not_change_the_bits() -> None:
    on_ranks(1, compare, STRIDE_2, timeout_s=200, OMP_NUM_THREADS="0")


JOB = ("--profile", "h100", "--model", "7B", "--sequence", "2048")
PLANNING = {
    "plan": [*JOB, "--world-size", "8", "--micro-batch", "1"],
    "sweep": [*JOB, "--world-sizes", "1,2,4,8", "--micro-batches", "1,2"],
    "cluster": [*JOB, "--gpus", "16", "--global-batch", "64", "--network-gb-per-s", "25"],
}
MEASURING = {
    "profile": ["--quick"],
    "doctor": [],
    "report": ["nothing"],
    "delink": ["nothing", "new", "--share", "a.0", "--into", "a.1", "--moments", "mean"],
}


def run_interrupted(output: Path, module: str, arguments: list[str], calls: int) -> int:
    written = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(written, 1)
    os.dup2(written, 2)
    left = [calls]

    def count(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            sys.setprofile(None)
            os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    main_of_program = importlib.import_module(module).main
    sys.setprofile(count)
    try:
        return main_of_program(arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def interrupt_commands(folder: Path) -> list[tuple[str, int, str]]:
    freeze_imported()
    os.chdir(folder)
    found = []
    programs = {"deep_opt_states.cli.main": {**PLANNING, **MEASURING}, "perf_model.__main__": PLANNING}
    for module, commands in programs.items():
        for command, arguments in commands.items():
            for calls in (20, 20_000):
                output = folder / f"{module} {command} {calls}"
                run = partial(run_interrupted, output, module, [command, *arguments], calls)
                found.append((output.name, exit_code_of_child(run), output.read_text()))
    return found


def test_ctrl_c_ends_every_command_with_one_line_and_code_130(tmp_path: Path) -> None:
    (found,) = on_ranks(1, interrupt_commands, tmp_path, timeout_s=200, group=nullcontext)
    for name, code, output in found:
        assert code == 130, (name, output)
        assert output.endswith("\nInterrupted by Ctrl-C.\n"), (name, output)
        assert "Traceback" not in output, (name, output)
