"""Kills runs of two ranks at random moments, restarts each from its last checkpoint, and compares with stock there.

Arguments: a folder, a seed and how many runs. What is random is the moment: where it was is answered, too.
"""

from __future__ import annotations

import io
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from deep_opt_states.device.kernels.adam import PartUpdate
from deep_opt_states.device.kernels.fused import FusedAdam
from tests.launch import answer
from tests.zero.forked import Group, import_late
from tests.zero.parity.arm import Block, Record, closing_engine, collect, differences
from tests.zero.parity.case import AT_ONCE, CPU, STREAMED_ONE_SLOT, STRIDE_2, Case
from tests.zero.parity.model import batch

CASE = Case(name="killed", blocks=(), world_size=2, steps=6, clip=0.5)
BLOCKS = (STRIDE_2, CPU, STREAMED_ONE_SLOT, {**STRIDE_2, **AT_ONCE})

PHASES = ("save", "update", "backward", "forward")
TIMEOUT_S = 100

# Of what would be over too soon to be met by a random moment.
UPDATE_S = FORWARD_S = 0.002
WRITE_S = 0.02


def train(engine: Any, folder: Path, first: int, mark: Any) -> None:
    """Saves after each step."""
    for step in range(first, CASE.steps):
        x, target = batch(CASE, dist.get_rank(), step, torch.bfloat16)
        mark("forward", step)
        loss = engine(x, target, None, 1.0)
        mark("backward", step)
        engine.backward(loss)
        engine.step()
        mark("stepped", step)
        if step % 2:
            # Its update goes on in a forward, as it would without a checkpoint.
            with torch.no_grad():
                mark("forward", step)
                engine(x, target, None, 1.0)
        engine.save_checkpoint(str(folder))


def stock(folder: Path) -> None:
    with closing_engine(CASE, None) as engine:
        train(engine, folder, 0, lambda *_: None)


def victim(folder: Path, block: Block) -> None:
    with (folder / f"marks {dist.get_rank()}").open("w", buffering=1) as marks, closing_engine(CASE, block) as engine:
        at = [0]

        def mark(phase: str, step: int | None = None) -> None:
            at[0] = at[0] if step is None else step
            marks.write(f"{phase} {at[0]}\n")

        with slowly(engine, mark):
            train(engine, folder / "saved", 0, mark)


@contextmanager
def slowly(engine: Any, mark: Any) -> Iterator[None]:
    update_parts = FusedAdam.update_parts

    def marked_update(self: FusedAdam, updates: Sequence[PartUpdate]) -> None:
        for each in updates:
            mark("update")
            time.sleep(UPDATE_S)
            update_parts(self, [each])
            time.sleep(UPDATE_S)

    def marked_save(self: Any, state_dict: Any, path: str) -> None:
        """As a slow disk does. Rank 1's is the slower."""
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
        patched.enter_context(mock.patch.object(FusedAdam, "update_parts", marked_update))
        patched.enter_context(mock.patch.object(TorchCheckpointEngine, "save", marked_save))
        for layer in engine.module.layers:
            layer.register_forward_pre_hook(lambda *_: time.sleep(FORWARD_S))
        yield


def restarted(folder: Path, reference: Path, tag: str, block: Block) -> None:
    """Both from the checkpoint of that step: stock from its own, ours from what was left when it was killed."""
    first = int(tag.removeprefix("global_step"))
    records = []
    for root, its, its_tag in ((reference, None, tag), (folder / "saved", block, None)):
        with closing_engine(CASE, its) as engine:
            path, _ = engine.load_checkpoint(str(root), tag=its_tag)
            assert path is not None
            assert f"/{tag}/" in path
            train(engine, folder / "again" if its is None else root, first, lambda *_: None)
            records.append(Record())
            collect(engine.optimizer, records[-1])
    assert len(records[0].tensors) > 30
    assert set(records[0].numbers["step"]) == {CASE.steps}
    assert differences(*records) == []


def killed(folder: Path, phase: str, lot: random.Random) -> dict[str, Any]:
    """What was said by each rank last, and by ``latest``."""
    block, step = lot.choice(BLOCKS), lot.randrange(2, CASE.steps)
    run = Group(partial(victim, folder, block), CASE.world_size, folder)
    watched = folder / f"marks {lot.randrange(CASE.world_size)}"
    # Of the updates of a step, of the parts of a file: one of them.
    number = lot.randint(1, 4) if phase in ("update", "save") else 1
    end_s = time.monotonic() + TIMEOUT_S
    while not watched.exists() or watched.read_text().count(f"{phase} {step}\n") < number:
        assert time.monotonic() < end_s, run.problem(timeout_s=0)
        time.sleep(0.001)
    time.sleep(lot.uniform(0, 0.03 if phase == "save" else 0.004))
    # A launcher kills the others, when it has noticed.
    run.kill(first=lot.randrange(CASE.world_size), others_after_s=lot.choice((0, 0.02)))
    codes = run.codes(TIMEOUT_S)
    marks = [(folder / f"marks {rank}").read_text().splitlines()[-1] for rank in range(CASE.world_size)]
    latest = (folder / "saved" / "latest").read_text()
    return {"aimed at": f"{phase} {step}", "killed in": marks, "codes": codes, "latest": latest, "block": block}


def main(folder: Path, seed: int, kills: int) -> None:
    import_late()
    lot = random.Random(seed)
    reference = folder / "stock"
    problem = Group(partial(stock, reference), CASE.world_size, folder / "reference").problem(TIMEOUT_S)
    assert problem == "", problem
    before: tuple[Group, dict[str, Any]] | None = None
    for number in range(kills):
        here = folder / str(number)
        found = killed(here, PHASES[number % len(PHASES)], lot)
        tag = found["latest"]
        again = Group(partial(restarted, here, reference, tag, lot.choice(BLOCKS)), CASE.world_size, here / "again")
        # The restart of one beside the run of the next.
        tell(before)
        before = again, found
    tell(before)


def tell(before: tuple[Group, dict[str, Any]] | None) -> None:
    if before is not None:
        again, found = before
        answer({**found, "problem": again.problem(TIMEOUT_S)})


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
