"""Check that a script may end, or fail, right after ``step()``: nothing hangs, and a failed update is logged.

The scripts run at the same time, each in its own processes. These are forked after the imports, which are slow, and
before anything is started. They end as a user's processes do, with the interpreter's shutdown.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from deep_opt_states.device.kernels.adam import RangeUpdate
from tests.kernels.intercepted import before_each_update
from tests.launch import free_port, remove_shared_memory
from tests.ranks import on_ranks
from tests.zero.parity.case import CPU, Case
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import make_engine
from tests.zero.rank_group import Rank, fork

PHASES = ("forward", "backward", "step", "update", "save")

WAYS = {
    "ends": (2,),
    "raises": (2,),
    "update fails": (1,),
    "rank 0 raises": (2,),
    "update hangs": (1,),
    "destroys the group": (2,),
    "SIGTERM": (2,),
    **{f"SIGTERM in {phase}": (2,) for phase in PHASES},
}
"""The ways to end, each with the numbers of ranks to try.

``rank 0 raises``: rank 1 continues. ``update hangs``: one update never ends. ``destroys the group``: the script
destroys the process group, and not the engine. ``SIGTERM in`` a phase after the first step and checkpoint comes to a
script with a handler that exits; ``update`` is a moment at which the worker updates.
"""

TIMEOUT_S = 80
"""The time after which a child is aborted, so that its exit code is wrong."""

UPDATE_S = 0.05
STEPPED = "has made its first step"


@dataclass
class Child(Rank):
    """A rank of a script that ends in one of the ``WAYS``."""

    way: str = ""
    signalled: bool = False


@dataclass
class Ending:
    """How a rank of a script has ended."""

    rank: int
    code: int
    has_stepped: bool
    output: str


def run(child: Child) -> None:
    """Run the user's script. The update of each range is delayed, so that it is in flight when the script ends."""
    deepspeed.init_distributed()
    case = Case(name="ending", blocks=(), world_size=child.world_size)
    engine = make_engine(case, CPU)
    # The second sub-group, without its persistent parameters.
    part = next(part for part in engine.optimizer._running.memory.units[2].parts if part.sub_group == 1)

    def delay_or_fail(update: RangeUpdate) -> None:
        time.sleep(UPDATE_S)
        if child.way == "SIGTERM in update" and engine.global_steps == 2:
            terminate()
        if child.way == "update fails" and (update.sub_group, update.element_range) == (1, part.elements):
            raise ValueError("injected failure")
        if child.way == "update hangs" and (update.sub_group, update.element_range) == (1, part.elements):
            time.sleep(1000)

    before_each_update(delay_or_fail).__enter__()
    if child.way.startswith("SIGTERM in"):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    x, target = batch(case, dist.get_rank(), 1, torch.bfloat16)

    def step() -> None:
        engine.backward(engine(x, target, None, 1.0))
        engine.step()
        assert engine.optimizer._update._executor.pending

    step()
    print(STEPPED, flush=True)
    if child.way in ("raises", "update hangs") or (child.way == "rank 0 raises" and child.rank == 0):
        raise RuntimeError("the user's exception")
    if child.way == "destroys the group":
        step()
        dist.destroy_process_group()
    if child.way.startswith("SIGTERM in"):
        saved = str(child.output.parent / f"saved {child.way}")
        engine.save_checkpoint(saved)
        with terminated_in(child.way.rpartition(" ")[2], engine):
            step()
            engine.save_checkpoint(saved)
    while child.way in ("rank 0 raises", "SIGTERM"):
        step()


def terminate(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def terminated_in(phase: str, engine: Any) -> AbstractContextManager[object]:
    """Send SIGTERM to this process when ``phase`` is reached inside the block. ``run`` does it in an update."""
    if phase == "forward":
        engine.module.layers[1].register_forward_pre_hook(terminate)
    elif phase == "backward":
        engine.module.layers[1].register_full_backward_hook(terminate)
    elif phase == "step":
        return mock.patch.object(engine.optimizer, "_optimizer_step", terminate)
    elif phase == "save":
        return mock.patch.object(TorchCheckpointEngine, "save", write_half)
    return nullcontext()


def write_half(_: object, state_dict: Any, path: str) -> None:
    Path(path).write_bytes(b"half")
    terminate()


def has_stepped(child: Child) -> bool:
    """Return whether the child has made its first step."""
    return child.output.exists() and STEPPED in child.output.read_text().splitlines()


ABORTED = "terminate called without an active exception"
"""PyTorch and Gloo sometimes abort with this message in the interpreter's shutdown, also with stock DeepSpeed."""

LOGGED = "The optimizer update was not applied as a whole (ValueError: injected failure)"

CODES = {
    "ends": [0, 0],
    "raises": [1, 1],
    "update fails": [0],
    # Rank 1 fails in a collective, because rank 0 has ended.
    "rank 0 raises": [1, 1],
    "update hangs": [1],
    "destroys the group": [0, 0],
    "SIGTERM": [-15, -15],
    **{f"SIGTERM in {phase}": [143, 143] for phase in PHASES},
}
"""The exit codes of the ranks of all runs, by the way in which they end."""

pytestmark = pytest.mark.xdist_group("ending")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder for outputs and checkpoints, after all scripts have ended."""
    return tmp_path_factory.mktemp("ending")


@pytest.fixture(scope="module")
def endings(folder: Path) -> dict[str, list[Ending]]:
    """Return how each rank of the scripts has ended, by the way in which they end."""
    (found,) = on_ranks(1, end_in_all_ways, folder, timeout_s=120, group=nullcontext)
    return found


def end_in_all_ways(folder: Path) -> dict[str, list[Ending]]:
    """Fork all scripts at the same time, and return how they have ended. A child runs its script, and never returns."""
    children: list[Child] = []
    ports = []
    for way, world_sizes in WAYS.items():
        for size in world_sizes:
            ports.append(free_port())
            ranks = [Child(rank, size, folder / f"{way} {size} {rank}", way=way) for rank in range(size)]
            child = fork(ranks, ports[-1])
            if child is not None:
                run(child)
                sys.exit()
            children += ranks
    endings: dict[str, list[Ending]] = defaultdict(list)
    codes = wait(children)
    for child in children:
        output = child.output.read_text()
        endings[child.way].append(Ending(child.rank, codes[child.pid], has_stepped(child), output))
    for port in ports:
        remove_shared_memory(port)
    return endings


def wait(children: list[Child]) -> dict[int, int]:
    """Wait for all children, and return their exit codes. Those that outlive the timeout write a traceback."""
    end_s = time.monotonic() + TIMEOUT_S
    running = {child.pid: child for child in children}
    codes = {}
    try:
        while running:
            for pid, child in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del running[pid]
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > end_s:
                    os.kill(pid, signal.SIGABRT)
                elif child.way == "SIGTERM" and not child.signalled and has_stepped(child):
                    child.signalled = True
                    os.kill(pid, signal.SIGTERM)
            time.sleep(0.02)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
    return codes


@pytest.mark.parametrize("way", CODES)
@pytest.mark.P6
def test_the_process_ends_as_without_the_plugin(way: str, endings: dict[str, list[Ending]], folder: Path) -> None:
    for ending, code in zip(endings[way], CODES[way], strict=True):
        assert ending.has_stepped, f"made no step\n{ending.output[-4000:]}"
        # Before a rank handles SIGTERM, a collective may fail because the other rank has exited.
        codes = (code, 1) if way.startswith("SIGTERM in") else (code,)
        assert ending.code in codes or ABORTED in ending.output, ending.output[-4000:]
        raises = way in ("raises", "update hangs") or (way == "rank 0 raises" and ending.rank == 0)
        assert ("the user's exception" in ending.output) == raises
        if way == "destroys the group":
            assert ending.output.count("memory of rank 0:") == (ending.rank == 0), ending.output[-4000:]
        assert ending.output.count(f"[deep_opt_states] ERROR: {LOGGED}") == (way == "update fails")
    if way.startswith("SIGTERM in"):
        assert 143 in [ending.code for ending in endings[way]]
        assert (folder / f"saved {way}" / "latest").read_text() == "global_step1"
