"""Check that a script may end, or fail, right after ``step()``: nothing hangs, and a failed update is logged.

This file is also the script. It runs in forked processes, which end as a user's do, with the interpreter's shutdown.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
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
from tests.launch import Finished, run_ranks
from tests.zero.parity.case import CPU, Case
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import make_engine

CODES = {
    "ends": [0, 0],
    "raises": [1, 1],
    # One update raises, or never ends.
    "update fails": [0],
    "update hangs": [1],
    # Rank 1 continues, and fails in a collective, because rank 0 has ended.
    "rank 0 raises": [1, 1],
    # The script destroys the process group, and not the engine.
    "destroys the group": [0, 0],
    "SIGTERM": [-15, -15],
    # SIGTERM comes to a script with a handler that exits, after the first step and checkpoint. In an update, it comes
    # while the worker updates.
    **{f"SIGTERM in {phase}": [143, 143] for phase in ("forward", "backward", "step", "update", "save")},
}

UPDATE_S = 0.05
STEPPED = "has made its first step"


def run(way: str, folder: str) -> None:
    deepspeed.init_distributed()
    case = Case(name="ending", blocks=(), world_size=dist.get_world_size())
    engine = make_engine(case, CPU)
    # The second sub-group, without its persistent parameters.
    part = next(part for part in engine.optimizer._running.memory.units[2].parts if part.sub_group == 1)

    def delay_or_fail(update: RangeUpdate) -> None:
        time.sleep(UPDATE_S)
        is_part = (update.sub_group, update.element_range) == (1, part.elements)
        if way == "SIGTERM in update" and engine.global_steps == 2:
            terminate()
        if way == "update fails" and is_part:
            raise ValueError("injected failure")
        if way == "update hangs" and is_part:
            time.sleep(1000)

    before_each_update(delay_or_fail).__enter__()
    if way.startswith("SIGTERM in"):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    x, target = batch(case, dist.get_rank(), 1, torch.bfloat16)

    def step() -> None:
        engine.backward(engine(x, target, None, 1.0))
        engine.step()
        assert engine.optimizer._update._executor.pending

    step()
    print(STEPPED, flush=True)
    if way in ("raises", "update hangs") or (way == "rank 0 raises" and dist.get_rank() == 0):
        raise RuntimeError("the user's exception")
    if way == "destroys the group":
        step()
        dist.destroy_process_group()
    if way == "SIGTERM":
        # If the other rank ends first, a collective fails, and the interpreter's shutdown waits for the timer.
        threading.Timer(random.uniform(0, 1), terminate).start()
    if way.startswith("SIGTERM in"):
        engine.save_checkpoint(folder)
        with terminated_in(way.rpartition(" ")[2], engine):
            step()
            engine.save_checkpoint(folder)
    while way in ("rank 0 raises", "SIGTERM"):
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


ABORTED = "terminate called without an active exception"
"""PyTorch and Gloo sometimes abort with this message in the interpreter's shutdown, also with stock DeepSpeed."""

LOGGED = "The optimizer update was not applied as a whole (ValueError: injected failure)"


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Finished]]]:
    with ThreadPoolExecutor() as pool:
        folders = {way: tmp_path_factory.mktemp("ending") for way in CODES}
        script = ["-m", "tests.zero.failures.test_ending"]
        running = {
            way: pool.submit(run_ranks, len(CODES[way]), [*script, way, str(folder)], timeout_s=100)
            for way, folder in folders.items()
        }
    return {way: (folders[way], future.result()) for way, future in running.items()}


@pytest.mark.xdist_group("ending")
@pytest.mark.parametrize("way", CODES)
@pytest.mark.P6
def test_the_process_ends_as_without_the_plugin(way: str, endings: dict[str, tuple[Path, list[Finished]]]) -> None:
    folder, ranks = endings[way]
    for rank, (ended, code) in enumerate(zip(ranks, CODES[way], strict=True)):
        output = ended.output
        assert STEPPED in output.splitlines(), f"made no step\n{output[-4000:]}"
        # Before a rank handles SIGTERM, a collective may fail because the other rank has exited.
        codes = (code, 1) if way.startswith("SIGTERM in") else (code,)
        assert ended.returncode in codes or ABORTED in output, output[-4000:]
        raises = way in ("raises", "update hangs") or (way == "rank 0 raises" and rank == 0)
        assert ("the user's exception" in output) == raises
        if way == "destroys the group":
            assert output.count("memory of rank 0:") == (rank == 0), output[-4000:]
        assert output.count(f"[deep_opt_states] ERROR: {LOGGED}") == (way == "update fails")
    if way.startswith("SIGTERM in"):
        assert 143 in [ended.returncode for ended in ranks] or all(ABORTED in ended.output for ended in ranks)
        assert (folder / "latest").read_text() == "global_step1"


if __name__ == "__main__":
    run(*sys.argv[1:])
