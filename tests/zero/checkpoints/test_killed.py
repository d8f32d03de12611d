"""Kill runs of several ranks at random moments, resume each from its last checkpoint, and compare with stock.

As a program, the arguments are a folder, a seed, the number of runs and the training. Stock resumes from its own
checkpoint of the same step.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from threading import Timer
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import DecoupledCheckpointEngine

from deep_opt_states.device.kernels.adam import RangeUpdate
from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.zero.guarded_states import GuardedStates
from deep_opt_states.zero.step.running_plan import RunningPlan
from perf_model.schedule.action import Action, ActionKind
from perf_model.schedule.placement import Placement
from tests.ranks import ended_ranks, on_ranks
from tests.tiers import thorough
from tests.zero.parity.case import CPU, STREAMED_ONE_SLOT, STRIDE_2, WITHOUT_FORWARD_OVERLAP, Case, eager
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import Block, assert_same_bits, closing_engine, gathered, recorded
from tests.zero.random_plans import moves_in_turn

CASE = Case(name="killed", blocks=(), world_size=2, steps=6, clip=0.5)
SERIAL_STRIDE_2, EAGER = {**STRIDE_2, **WITHOUT_FORWARD_OVERLAP}, eager(CPU)
BLOCKS = (STRIDE_2, SERIAL_STRIDE_2, STREAMED_ONE_SLOT, EAGER, eager(STRIDE_2), eager(STRIDE_2), STRIDE_2, EAGER)
PHASES = ("save", "load", "promotion", "speculation", "commit", "update", "backward", "forward")
PARTS = {"save": 4, "load": 5, "promotion": 2, "update": 4, "commit": 4}
WITHIN = ("commit", "speculation")

# Added to phases that are otherwise too short for a random moment to fall into them.
UPDATE_S = FORWARD_S = 0.002
WRITE_S = 0.02
LOAD_S = PROMOTION_S = 0.01
MOVES = moves_in_turn((Placement.RESIDENT, 700), (Placement.CPU, 300), (Placement.STREAMED, 500))
DECOUPLED = {"checkpoint": {"writer": {"type": "python", "decoupled": True}}}
KILLED = {"data parallel": CASE, "decoupled": replace(CASE, extra=DECOUPLED)}


def forward(engine: Any, step: int) -> torch.Tensor:
    x, target = batch(CASE, dist.get_rank(), step, torch.bfloat16)
    loss: torch.Tensor = engine(x, target, None, 1.0)
    return loss


def train(engine: Any, folder: Path, first: int, mark: Any = lambda *_: None) -> None:
    for step in range(first, CASE.steps):
        mark("forward", step)
        loss = forward(engine, step)
        mark("backward", step)
        engine.backward(loss)
        engine.step()
        mark("stepped", step)
        if step % 2:
            with torch.no_grad():
                mark("forward", step)
                forward(engine, step)
        engine.save_checkpoint(str(folder))


def stock(folder: Path) -> None:
    with closing_engine(CASE, None) as engine:
        train(engine, folder, 0)


def kill_all(pids: list[int], others_after_s: float) -> None:
    """Kill this rank, and the others later: a launcher does so as soon as it notices that one has ended."""
    others = " ".join(f"-{pid}" for pid in pids if pid != os.getpid())
    command = f"sleep {others_after_s}; kill -9 {others}"
    subprocess.Popen(command, shell=True, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.killpg(os.getpid(), signal.SIGKILL)


def victim(name: str, folder: Path, block: Block, moment: tuple[Any, ...], pauses_s: Sequence[float]) -> None:
    """Train until all ranks are killed: after a part of a phase of a step on a rank. For ``load``, load first."""
    rank, phase_of_kill, step_of_kill, part_of_kill = moment
    # DeepSpeed's launcher sets these.
    os.environ.update(CROSS_RANK="0", CROSS_SIZE="1")
    current_step, parts = [0], count(1)
    pids = gathered(os.getpid())

    def mark(phase: str, step: int | None = None) -> None:
        current_step[0] = current_step[0] if step is None else step
        is_phase = (dist.get_rank(), phase, current_step[0]) == (rank, phase_of_kill, step_of_kill)
        if is_phase and next(parts) == part_of_kill:
            if phase in WITHIN:
                kill_all(pids, pauses_s[1])
            Timer(pauses_s[0], kill_all, (pids, pauses_s[1])).start()

    with closing_engine(KILLED[name], block) as engine, ExitStack() as patched:
        patched.enter_context(slowed_down(engine, mark))
        if phase_of_kill == "promotion":
            patched.enter_context(MOVES())
        if phase_of_kill == "load":
            current_step[0] = step_of_kill
            engine.load_checkpoint(str(folder))
        train(engine, folder, current_step[0], mark)


def step_of(tag: str) -> int:
    return int(tag.removeprefix("global_step"))


@contextmanager
def slowed_down(engine: Any, mark: Any) -> Iterator[None]:
    """Delay and mark each part of an update, a save, a load and a move inside the block, and delay forwards."""

    def marked_save(self: Any, state_dict: Any, path: str) -> None:
        """Write the file in two parts, as slowly as a slow disk, and on rank 1 more slowly than on rank 0."""
        whole = io.BytesIO()
        torch.save(state_dict, whole)
        with open(path, "wb") as file:
            half = whole.tell() // 2
            for part in (whole.getbuffer()[:half], whole.getbuffer()[half:]):
                mark("save")
                time.sleep(WRITE_S * (1 + dist.get_rank()))
                file.write(part)
                file.flush()

    update_ranges = FusedAdam.update_ranges

    def marked_update(self: FusedAdam, updates: Sequence[RangeUpdate]) -> None:
        for update in updates:
            marked(partial(update_ranges, self, [update]), "update", UPDATE_S)

    def marked(action: Callable[[], Any], phase: str, pause_s: float) -> Any:
        mark(phase)
        time.sleep(pause_s)
        result = action()
        time.sleep(pause_s)
        return result

    def marking(owner: type, method: str, phase: str, pause_s: float) -> AbstractContextManager[object]:
        original = getattr(owner, method)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            return marked(partial(original, *args, **kwargs), phase, pause_s)

        return mock.patch.object(owner, method, replacement)

    with ExitStack() as patched:
        # DeepSpeed's decoupled engine cannot load what it has saved: docs/upstream/decoupled_load.py.
        patched.enter_context(mock.patch.object(DecoupledCheckpointEngine, "load", TorchCheckpointEngine.load))
        patched.enter_context(mock.patch.object(FusedAdam, "update_ranges", marked_update))
        patched.enter_context(mock.patch.object(TorchCheckpointEngine, "save", marked_save))
        for owner, method, phase, pause_s in (
            (DecoupledCheckpointEngine, "save", "save", WRITE_S),
            (DecoupledCheckpointEngine, "commit", "save", WRITE_S),
            (DecoupledCheckpointEngine, "load", "load", LOAD_S),
            (TorchCheckpointEngine, "load", "load", LOAD_S),
            (GuardedStates, "_rigid_load_state_dict", "load", LOAD_S),
            (GuardedStates, "_adopt_loaded_states", "load", LOAD_S),
            (RunningPlan, "_set", "promotion", PROMOTION_S),
        ):
            patched.enter_context(marking(owner, method, phase, pause_s))
        executor = engine.optimizer._running.executor
        run = executor._issuer._run

        def marked_commit(action: Action, original: Any = run[ActionKind.COMMIT]) -> None:
            original(action)
            mark("commit")

        def marked_adoption(action: Action, original: Any = run[ActionKind.ADOPT]) -> None:
            original(action)
            mark("commit")

        def marked_speculation(action: Action, original: Any = run[ActionKind.SPECULATE]) -> None:
            # A unit that was not speculated in backward runs in the update.
            is_in_backward = not executor._pending
            original(action)
            if is_in_backward:
                mark("speculation")

        patched.enter_context(
            mock.patch.dict(
                run,
                {
                    ActionKind.COMMIT: marked_commit,
                    ActionKind.SPECULATE: marked_speculation,
                    ActionKind.ADOPT: marked_adoption,
                },
            )
        )
        for layer in engine.module.layers:
            layer.register_forward_pre_hook(lambda *_: time.sleep(FORWARD_S))
        yield


def resume_and_compare(reference: Path, runs: list[tuple[Path, str, Block]]) -> None:
    """Resume stock from ``reference`` and each killed run from its files: both must end with the same bits."""
    for folder, tag, block in runs:
        records = []
        for root, saved, variant in ((reference, folder / "again", None), (folder / "saved", folder / "saved", block)):
            with closing_engine(CASE, variant) as engine:
                path, _ = engine.load_checkpoint(str(root), tag=tag)
                assert path is not None
                assert f"/{tag}/" in path
                train(engine, saved, step_of(tag))
                records.append(recorded(engine))
        assert len(records[0].tensors) > 30
        assert set(records[0].numbers["step"]) == {CASE.steps}
        assert_same_bits(*records)


def kill_and_resume(folder: Path, seed: int, kills: int, name: str) -> None:
    runs = []
    chance, reference, ranks = random.Random(seed), folder / "stock", CASE.world_size
    on_ranks(ranks, stock, reference)
    for number in range(kills):
        phase, block, step = PHASES[number % len(PHASES)], BLOCKS[number % len(BLOCKS)], chance.randrange(2, CASE.steps)
        # A decoupled writer saves all files in one call.
        part = chance.randint(1, 2 if (phase, name) == ("save", "decoupled") else PARTS.get(phase, 1))
        moment = chance.randrange(ranks), phase, step, part
        pauses_s = chance.uniform(0, 0.03 if phase == "save" else 0.004), chance.choice((0, 0.02))
        here = folder / str(number)
        saved = here / "saved"
        saved.mkdir(parents=True)
        if phase == "load":
            shutil.copytree(reference / f"global_step{step}", saved / f"global_step{step}")
            (saved / "latest").write_text(f"global_step{step}")
        ended, _ = ended_ranks(ranks, victim, name, saved, block, moment, pauses_s)
        tag = last_complete(saved, (saved / "latest").read_text(), reference)
        runs.append((here, tag, chance.choice(BLOCKS)))
        codes = [rank.returncode for rank in ended]
        print(f"killed at {moment} with {codes}, {block}, resumes from {tag} with {runs[-1][2]}", flush=True)
        # A rank that outlives the other for a moment may fail in a collective.
        assert -9 in codes
        assert set(codes) <= {-9, 1}
    on_ranks(ranks, resume_and_compare, reference, runs, timeout_s=900)


def last_complete(saved: Path, latest: str, reference: Path) -> str:
    """Return the newest complete tag. A kill may leave ``latest`` empty, or files incomplete (``docs/upstream.md``)."""

    def is_complete(tag: str) -> bool:
        return all(is_readable(saved / tag / path.name) for path in (reference / tag).iterdir())

    newest = step_of(latest) if latest else max(step_of(path.name) for path in reference.glob("global_step*"))
    tags = [f"global_step{step}" for step in range(newest, 0, -1)]
    return next((tag for tag in tags if is_complete(tag)), latest)


def is_readable(path: Path) -> bool:
    try:
        torch.load(path, weights_only=False)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError):
        return False
    return True


@pytest.mark.P1
@pytest.mark.P4
@pytest.mark.parametrize("name", ["data parallel", thorough("decoupled")])
def test_a_killed_run_resumes_from_its_last_checkpoint_bit_identically_to_stock(name: str, tmp_path: Path) -> None:
    kill_and_resume(tmp_path, 1, 5, name)


if __name__ == "__main__":
    # The ranks import this module by its name.
    from tests.zero.checkpoints import test_killed

    test_killed.kill_and_resume(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
