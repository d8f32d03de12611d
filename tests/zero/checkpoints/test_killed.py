"""Kill runs of several ranks at random moments, resume each from its last checkpoint, and compare with stock.

As a program, the arguments are a folder, a seed, the number of runs and the training.
Stock resumes from its own checkpoint of the same step. Each answer names the moment of the kill, which also depends on
the timing of the machine. A restart that hangs in ``init_distributed`` is repeated, and the answer counts it: no code
of the plugin has run then.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
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
from perf_model.schedule.action import ActionKind
from perf_model.schedule.placement import Placement
from tests.fork_server import import_all
from tests.launch import answer, run_ranks
from tests.ranks import ended_ranks, on_ranks
from tests.tiers import thorough
from tests.zero.parity.case import CPU, STREAMED_ONE_SLOT, STRIDE_2, WITHOUT_FORWARD_OVERLAP, Case, eager
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import Block, Record, closing_engine, collect, differences, wait_for_speculations
from tests.zero.random_plans import moves_in_turn
from tests.zero.rank_group import Group
from tests.zero.tensor_parallel.cases import TensorParallelCase, closing_engine_of, tokens_of
from tests.zero.tensor_parallel.layouts import MODEL_RANKS, layouts

CASE = Case(name="killed", blocks=(), world_size=2, steps=6, clip=0.5)
BLOCKS = (STRIDE_2, eager(CPU), STREAMED_ONE_SLOT, {**STRIDE_2, **WITHOUT_FORWARD_OVERLAP})

PHASES = ("save", "load", "promotion", "update", "backward", "forward")
PARTS = {"load": 5, "promotion": 2, "update": 4}
"""The number of parts of a phase, at least, in a step of each run. ``KilledTraining`` has that of a save."""

TIMEOUT_S = 100
RESTARTS = 3
"""How often a run is started again if it hangs in ``init_distributed``."""

# Added to phases that are otherwise too short for a random moment to fall into them.
UPDATE_S = FORWARD_S = 0.002
WRITE_S = 0.02
LOAD_S = PROMOTION_S = 0.01

MOVES = moves_in_turn((Placement.RESIDENT, 700), (Placement.CPU, 300), (Placement.STREAMED, 500))
"""The plans of a run that is killed while units move."""


@dataclass(frozen=True, kw_only=True)
class KilledTraining:
    """Training on some ranks, with an engine that is killed, or another one, whose model has these inputs in a step."""

    world_size: int
    open_engine: Callable[[Block], AbstractContextManager[Any]]
    open_victim: Callable[[Block], AbstractContextManager[Any]]
    inputs: Callable[[int], tuple[Any, ...]]
    layers: Callable[[Any], Iterable[torch.nn.Module]]
    parts_of_save: int = 4


def data_parallel(killed: Case = CASE) -> KilledTraining:
    return KilledTraining(
        world_size=CASE.world_size,
        open_engine=partial(closing_engine, CASE),
        open_victim=partial(closing_engine, killed),
        inputs=lambda step: (*batch(CASE, dist.get_rank(), step, torch.bfloat16), None, 1.0),
        layers=lambda engine: engine.module.layers,
    )


def with_decoupled_writer() -> KilledTraining:
    # DeepSpeed's launcher sets these.
    os.environ.update(CROSS_RANK="0", CROSS_SIZE="1")
    killed = replace(CASE, extra={"checkpoint": {"writer": {"type": "python", "decoupled": True}}})
    return replace(data_parallel(killed), parts_of_save=2)


def beside_autotp() -> KilledTraining:
    case = TensorParallelCase("AutoTP", "bf16", "clipping", zero_init=False)

    def open_engine(block: Block) -> AbstractContextManager[Any]:
        return closing_engine_of(case, layouts()[case.layout], block)

    return KilledTraining(
        world_size=2 * MODEL_RANKS,
        open_engine=open_engine,
        open_victim=open_engine,
        inputs=lambda step: (tokens_of(step),),
        layers=lambda engine: engine.module.model.model.layers,
    )


def train(training: KilledTraining, engine: Any, folder: Path, first: int, mark: Any) -> None:
    """Train from step ``first`` on, and save after each step. After every second one, a forward overlaps first."""
    for step in range(first, CASE.steps):
        inputs = training.inputs(step)
        mark("forward", step)
        loss = engine(*inputs)
        mark("backward", step)
        engine.backward(loss)
        engine.step()
        mark("stepped", step)
        if step % 2:
            with torch.no_grad():
                mark("forward", step)
                engine(*inputs)
        engine.save_checkpoint(str(folder))


def stock(training: KilledTraining, folder: Path) -> None:
    with training.open_engine(None) as engine:
        train(training, engine, folder, 0, lambda *_: None)


def victim(training: KilledTraining, folder: Path, block: Block, phase: str) -> None:
    """Train until this process is killed, and write each phase that begins to a file; for ``load``, load first."""
    marks_path = folder / f"marks {dist.get_rank()}"
    with ExitStack() as open_:
        marks = open_.enter_context(marks_path.open("w", buffering=1))
        engine = open_.enter_context(training.open_victim(block))
        current_step = [0]

        def mark(phase: str, step: int | None = None) -> None:
            current_step[0] = current_step[0] if step is None else step
            marks.write(f"{phase} {current_step[0]}\n")

        open_.enter_context(slowed_down(training.layers(engine), mark))
        if phase == "promotion":
            open_.enter_context(MOVES())
        saved = folder / "saved"
        if phase == "load":
            first = step_of((saved / "latest").read_text())
            current_step[0] = first
            engine.load_checkpoint(str(saved))
        else:
            first = 0
        train(training, engine, saved, first, mark)


def step_of(tag: str) -> int:
    return int(tag.removeprefix("global_step"))


@contextmanager
def slowed_down(layers: Iterable[torch.nn.Module], mark: Any) -> Iterator[None]:
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

        def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
            return marked(partial(original, self, *args, **kwargs), phase, pause_s)

        return mock.patch.object(owner, method, replacement)

    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(FusedAdam, "update_ranges", marked_update))
        patched.enter_context(mock.patch.object(TorchCheckpointEngine, "save", marked_save))
        for writer_method in ("save", "commit"):
            patched.enter_context(marking(DecoupledCheckpointEngine, writer_method, "save", WRITE_S))
        # DeepSpeed's decoupled engine cannot load what it has saved: docs/upstream/decoupled_load.py.
        patched.enter_context(mock.patch.object(DecoupledCheckpointEngine, "load", TorchCheckpointEngine.load))
        for owner in (TorchCheckpointEngine, DecoupledCheckpointEngine):
            patched.enter_context(marking(owner, "load", "load", LOAD_S))
        patched.enter_context(marking(GuardedStates, "_rigid_load_state_dict", "load", LOAD_S))
        patched.enter_context(marking(GuardedStates, "_adopt_loaded_states", "load", LOAD_S))
        patched.enter_context(marking(RunningPlan, "_set", "promotion", PROMOTION_S))
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: time.sleep(FORWARD_S))
        yield


def resume_and_compare(training: KilledTraining, folder: Path, reference: Path, tag: str, block: Block) -> None:
    """Resume stock from ``reference`` and the killed run from its files: both must end with the same bits."""
    first = step_of(tag)
    records = []
    for root, variant in ((reference, None), (folder / "saved", block)):
        with training.open_engine(variant) as engine:
            path, _ = engine.load_checkpoint(str(root), tag=tag)
            assert path is not None
            assert f"/{tag}/" in path
            train(training, engine, folder / "again" if variant is None else root, first, lambda *_: None)
            records.append(Record())
            collect(engine.optimizer, records[-1])
    assert len(records[0].tensors) > 30
    assert set(records[0].numbers["step"]) == {CASE.steps}
    assert differences(*records) == []


def run_and_kill(
    training: KilledTraining, folder: Path, reference: Path, phase: str, rng: random.Random
) -> dict[str, Any]:
    """Kill a run in a random step's ``phase``. Return the last mark of each rank, the exit codes and ``latest``."""
    block, step = rng.choice(BLOCKS), rng.randrange(2, CASE.steps)
    if phase == "load":
        shutil.copytree(reference / f"global_step{step}", folder / "saved" / f"global_step{step}")
        (folder / "saved" / "latest").write_text(f"global_step{step}")
    run = Group(partial(victim, training, folder, block, phase), training.world_size, folder)
    watched = folder / f"marks {rng.randrange(training.world_size)}"
    number = rng.randint(1, {**PARTS, "save": training.parts_of_save}.get(phase, 1))
    end_s = time.monotonic() + TIMEOUT_S
    while not watched.exists() or watched.read_text().count(f"{phase} {step}\n") < number:
        may_follow = run.alive() and time.monotonic() < end_s
        assert may_follow, f"no {phase} {number} of {step}: {run.problem(timeout_s=0)}"
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.03 if phase == "save" else 0.004))
    # A launcher kills the other ranks as soon as it notices that one has ended.
    run.kill(first=rng.randrange(training.world_size), others_after_s=rng.choice((0, 0.02)))
    codes = run.codes(TIMEOUT_S)
    # A rank may be killed before its first phase.
    marks = [(folder / f"marks {rank}").read_text().splitlines()[-1:] for rank in range(training.world_size)]
    latest = (folder / "saved" / "latest").read_text()
    return {
        "phase": phase,
        "aimed at": f"{phase} {step}",
        "killed in": marks,
        "codes": codes,
        "latest": latest,
        "block": block,
    }


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """A run that resumes from the files of a killed run, which ``found`` describes. ``start`` begins it again."""

    start: Callable[[], Group]
    group: Group
    found: dict[str, Any]

    def report(self) -> None:
        """Wait for the run, and answer with its problem, how often it hung at its start, and the data of the kill."""
        hangs, problem = 0, self.group.problem(TIMEOUT_S)
        # An aborted rank has waited for the other ranks to start.
        while "Fatal Python error: Aborted" in problem and " in init_distributed" in problem and hangs < RESTARTS:
            hangs += 1
            problem = self.start().problem(TIMEOUT_S)
        answer({**self.found, "problem": problem, "hung in init_distributed": hangs})


def main(folder: Path, seed: int, kills: int, training: KilledTraining) -> None:
    import_all()
    rng = random.Random(seed)
    reference = folder / "stock"
    work = partial(stock, training, reference)
    problem = Group(work, training.world_size, folder / "reference").problem(TIMEOUT_S)
    assert problem == "", problem
    previous: Resumption | None = None
    for number in range(kills):
        here = folder / str(number)
        found = run_and_kill(training, here, reference, PHASES[number % len(PHASES)], rng)
        tag = last_complete(here / "saved", found["latest"], reference)
        found["resumed from"] = tag
        compare = partial(resume_and_compare, training, here, reference, tag, rng.choice(BLOCKS))
        start = partial(Group, compare, training.world_size, here / "again")
        resumed = Resumption(start=start, group=start(), found=found)
        # A resumed run overlaps with the next run to be killed.
        if previous is not None:
            previous.report()
            shutil.rmtree(folder / str(number - 1))
        previous = resumed
    if previous is not None:
        previous.report()


def last_complete(saved: Path, latest: str, reference: Path) -> str:
    """Return ``latest``, or the newest tag whose files are complete.

    DeepSpeed writes ``latest`` when the decoupled writer of rank 0 has finished, and the writer of another rank may not
    have. A kill while DeepSpeed writes ``latest`` leaves it empty (``docs/upstream.md``).
    """

    def is_complete(tag: str) -> bool:
        return all(is_readable(saved / tag / path.name) for path in (reference / tag).iterdir())

    newest = step_of(latest) if latest else max(step_of(path.name) for path in reference.glob("global_step*"))
    tags = [f"global_step{step}" for step in range(newest, 0, -1)]
    return next((tag for tag in tags if is_complete(tag)), latest)


def is_readable(path: Path) -> bool:
    """Return whether a file that ``torch.save`` was writing is complete."""
    try:
        torch.load(path, weights_only=False)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError):
        return False
    return True


TRAININGS: dict[str, Callable[[], KilledTraining]] = {
    "data parallel": data_parallel,
    "AutoTP": beside_autotp,
    "decoupled": with_decoupled_writer,
}


@pytest.mark.P1
@pytest.mark.P4
@pytest.mark.parametrize("training", ["data parallel", thorough("AutoTP"), thorough("decoupled")])
def test_a_killed_run_resumes_from_its_last_checkpoint_with_the_bits_of_stock(training: str, tmp_path: Path) -> None:
    """Check it on two ranks, with a decoupled writer beside each of them, and beside tensor parallelism on four."""
    kills, seed = ("save", "load", "promotion", "update"), 1
    script = ["-m", __name__, str(tmp_path), str(seed), str(len(kills)), training]
    (finished,) = run_ranks(1, script, timeout_s=900)
    assert finished.returncode == 0, finished.output[-4000:]
    found = finished.answers()
    assert tuple(kill["phase"] for kill in found) == kills
    for kill in found:
        # A rank that outlives the other for a moment may fail in a collective.
        assert -9 in kill["codes"], kill
        assert set(kill["codes"]) <= {-9, 1}, kill
        assert kill["problem"] == "", kill


def kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def speculate_and_be_killed(folder: Path, moment: str) -> None:
    """Save a checkpoint of stock and one of eager steps, and kill this rank in the eager step that follows."""
    training = data_parallel()
    for name, block in (("stock", None), ("saved", eager(CPU))):
        with training.open_engine(block) as engine:
            for step in range(3):
                engine.backward(engine(*training.inputs(step)))
                engine.step()
            engine.save_checkpoint(str(folder / name))
            dist.barrier()
            engine.backward(engine(*training.inputs(3)))
            if block is not None:
                assert len(wait_for_speculations(engine)) > 2
                if moment == "speculated":
                    kill()
                with mock.patch.dict(engine.optimizer._running.executor._issuer._run, {ActionKind.COMMIT: kill}):
                    engine.step()
                    engine.optimizer._update.wait()


@pytest.mark.P4
@pytest.mark.parametrize("moment", ["speculated", "commit"])
def test_a_run_that_is_killed_between_speculation_and_commit_resumes_with_the_bits_of_stock(
    moment: str, tmp_path: Path
) -> None:
    killed = ended_ranks(2, partial(speculate_and_be_killed, tmp_path, moment), tmp_path)
    assert [rank.returncode for rank in killed] == [-signal.SIGKILL] * 2, killed[0].output[-5000:]
    on_ranks(2, resume_with_both, tmp_path)


def resume_with_both(folder: Path) -> None:
    for block in (None, eager(CPU)):
        resume_and_compare(data_parallel(), folder, folder / "stock", "global_step3", block)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), TRAININGS[sys.argv[4]]())
