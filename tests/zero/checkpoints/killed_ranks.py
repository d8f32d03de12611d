"""Kill runs of several ranks at random moments, resume each from its last checkpoint, and compare with stock.

The arguments are a folder, a seed and the number of runs, and "AutoTP" if ranks share a model. Stock resumes from its
own checkpoint of the same step. Each answer names the moment of the kill, which also depends on the timing of the
machine.
"""

from __future__ import annotations

import io
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from deep_opt_states.device.kernels.adam import RangeUpdate
from deep_opt_states.device.kernels.fused import FusedAdam
from tests.fork_server import import_all
from tests.launch import answer
from tests.zero.parity.case import CPU, STREAMED_ONE_SLOT, STRIDE_2, WITHOUT_FORWARD_OVERLAP, Case
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import Block, Record, closing_engine, collect, differences
from tests.zero.rank_group import Group
from tests.zero.tensor_parallel.cases import TensorParallelCase
from tests.zero.tensor_parallel.layouts import MODEL_RANKS, layouts
from tests.zero.tensor_parallel.tensor_parallel_ranks import closing_engine_of, tokens_of

CASE = Case(name="killed", blocks=(), world_size=2, steps=6, clip=0.5)
BLOCKS = (STRIDE_2, CPU, STREAMED_ONE_SLOT, {**STRIDE_2, **WITHOUT_FORWARD_OVERLAP})

PHASES = ("save", "update", "backward", "forward")
TIMEOUT_S = 100

# Added to phases that are otherwise too short for a random moment to fall into them.
UPDATE_S = FORWARD_S = 0.002
WRITE_S = 0.02


@dataclass(frozen=True, kw_only=True)
class KilledTraining:
    """Training on ``world_size`` ranks.

    ``open_engine`` returns a context with an engine, given the plugin's block. ``inputs`` returns the arguments of the
    model in a step, and ``layers`` the layers of an engine's model.
    """

    world_size: int
    open_engine: Callable[[Block], AbstractContextManager[Any]]
    inputs: Callable[[int], tuple[Any, ...]]
    layers: Callable[[Any], Iterable[torch.nn.Module]]


def data_parallel() -> KilledTraining:
    """Return training on two ranks, each of which has the whole model."""
    return KilledTraining(
        world_size=CASE.world_size,
        open_engine=partial(closing_engine, CASE),
        inputs=lambda step: (*batch(CASE, dist.get_rank(), step, torch.bfloat16), None, 1.0),
        layers=lambda engine: engine.module.layers,
    )


def beside_autotp() -> KilledTraining:
    """Return training on four ranks, two of which share a model."""
    case = TensorParallelCase("AutoTP", "bf16", "clipping", zero_init=False)
    return KilledTraining(
        world_size=2 * MODEL_RANKS,
        open_engine=lambda block: closing_engine_of(case, layouts()[case.layout], block),
        inputs=lambda step: (tokens_of(step),),
        layers=lambda engine: engine.module.model.model.layers,
    )


def train(training: KilledTraining, engine: Any, folder: Path, first: int, mark: Any) -> None:
    """Train from step ``first`` on, and save a checkpoint after each step."""
    for step in range(first, CASE.steps):
        inputs = training.inputs(step)
        mark("forward", step)
        loss = engine(*inputs)
        mark("backward", step)
        engine.backward(loss)
        engine.step()
        mark("stepped", step)
        if step % 2:
            # This forward overlaps with the update, as it would without a checkpoint.
            with torch.no_grad():
                mark("forward", step)
                engine(*inputs)
        engine.save_checkpoint(str(folder))


def stock(training: KilledTraining, folder: Path) -> None:
    """Train with stock DeepSpeed and keep the checkpoint of every step."""
    with training.open_engine(None) as engine:
        train(training, engine, folder, 0, lambda *_: None)


def victim(training: KilledTraining, folder: Path, block: Block) -> None:
    """Train with the plugin, and write each phase that begins to a file, until this process is killed."""
    marks_path = folder / f"marks {dist.get_rank()}"
    with marks_path.open("w", buffering=1) as marks, training.open_engine(block) as engine:
        current_step = [0]

        def mark(phase: str, step: int | None = None) -> None:
            current_step[0] = current_step[0] if step is None else step
            marks.write(f"{phase} {current_step[0]}\n")

        with slowed_down(training.layers(engine), mark):
            train(training, engine, folder / "saved", 0, mark)


@contextmanager
def slowed_down(layers: Iterable[torch.nn.Module], mark: Any) -> Iterator[None]:
    """Delay updates, saves and forwards inside the block, and mark each update and each part of a saved file."""
    update_ranges = FusedAdam.update_ranges

    def marked_update(self: FusedAdam, updates: Sequence[RangeUpdate]) -> None:
        for update in updates:
            mark("update")
            time.sleep(UPDATE_S)
            update_ranges(self, [update])
            time.sleep(UPDATE_S)

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

    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(FusedAdam, "update_ranges", marked_update))
        patched.enter_context(mock.patch.object(TorchCheckpointEngine, "save", marked_save))
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: time.sleep(FORWARD_S))
        yield


def resume_and_compare(training: KilledTraining, folder: Path, reference: Path, tag: str, block: Block) -> None:
    """Resume stock and the killed run from the checkpoint of the same step, and check that they end with the same bits.

    Stock resumes from its own checkpoint in ``reference``, the plugin from the files that the killed run left in
    ``folder``.
    """
    first = int(tag.removeprefix("global_step"))
    records = []
    for root, variant, variant_tag in ((reference, None, tag), (folder / "saved", block, None)):
        with training.open_engine(variant) as engine:
            path, _ = engine.load_checkpoint(str(root), tag=variant_tag)
            assert path is not None
            assert f"/{tag}/" in path
            train(training, engine, folder / "again" if variant is None else root, first, lambda *_: None)
            records.append(Record())
            collect(engine.optimizer, records[-1])
    assert len(records[0].tensors) > 30
    assert set(records[0].numbers["step"]) == {CASE.steps}
    assert differences(*records) == []


def run_and_kill(training: KilledTraining, folder: Path, phase: str, rng: random.Random) -> dict[str, Any]:
    """Kill a run in a random step's ``phase``. Return the last mark of each rank, the exit codes and ``latest``."""
    block, step = rng.choice(BLOCKS), rng.randrange(2, CASE.steps)
    run = Group(partial(victim, training, folder, block), training.world_size, folder)
    watched = folder / f"marks {rng.randrange(training.world_size)}"
    # A step has several updates, and a saved file several parts: choose one of them.
    number = rng.randint(1, 4) if phase in ("update", "save") else 1
    end_s = time.monotonic() + TIMEOUT_S
    while not watched.exists() or watched.read_text().count(f"{phase} {step}\n") < number:
        assert time.monotonic() < end_s, run.problem(timeout_s=0)
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.03 if phase == "save" else 0.004))
    # A launcher kills the other ranks as soon as it notices that one has ended.
    run.kill(first=rng.randrange(training.world_size), others_after_s=rng.choice((0, 0.02)))
    codes = run.codes(TIMEOUT_S)
    marks = [(folder / f"marks {rank}").read_text().splitlines()[-1] for rank in range(training.world_size)]
    latest = (folder / "saved" / "latest").read_text()
    return {"aimed at": f"{phase} {step}", "killed in": marks, "codes": codes, "latest": latest, "block": block}


def main(folder: Path, seed: int, kills: int, training: KilledTraining) -> None:
    """Kill and resume ``kills`` runs, and answer once per run."""
    import_all()
    rng = random.Random(seed)
    reference = folder / "stock"
    work = partial(stock, training, reference)
    problem = Group(work, training.world_size, folder / "reference").problem(TIMEOUT_S)
    assert problem == "", problem
    previous: tuple[Group, dict[str, Any]] | None = None
    for number in range(kills):
        here = folder / str(number)
        found = run_and_kill(training, here, PHASES[number % len(PHASES)], rng)
        tag = found["latest"]
        compare = partial(resume_and_compare, training, here, reference, tag, rng.choice(BLOCKS))
        resumed = Group(compare, training.world_size, here / "again")
        # A resumed run overlaps with the next run to be killed.
        report(previous)
        previous = resumed, found
    report(previous)


def report(previous: tuple[Group, dict[str, Any]] | None) -> None:
    """Wait for a resumed run, and answer with its problem and the data of its kill."""
    if previous is not None:
        resumed, found = previous
        answer({**found, "problem": resumed.problem(TIMEOUT_S)})


if __name__ == "__main__":
    chosen = beside_autotp() if sys.argv[4:] == ["AutoTP"] else data_parallel()
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), chosen)
