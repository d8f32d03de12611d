"""Load damaged checkpoints. Each must be refused without any effect, or loaded as stock loads it.

The arguments are a seed and the number of checkpoints, and "unchecked" to load them without our check. Two engines,
stock and the plugin's, train, save, and train on. Copies of stock's checkpoint are damaged at random. The plugin must
refuse a copy by its own error on every rank, with the files and the engine as they were, or stock must be able to load
it, with the same states. At the end both engines train on, and must have the same bits. There is one answer for each
damaged checkpoint, and one for the end.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from deep_opt_states.zero import plugin
from deep_opt_states.zero.checkpoint_check import CheckpointError
from tests.fork_server import import_all
from tests.launch import answer
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.parity.training import Record, closing_engine, collect, differences, shared_folder, train
from tests.zero.process_group import process_group

STEPS = 3
TAG = f"global_step{STEPS}"

OTHER_VALUES = (None, True, -1, 10**30, math.nan, "", "text", b"\0", [], {}, {"a": 1}, (1, 2), torch.zeros(3), object)


def changed(value: Any, rng: random.Random) -> Any:
    """Return a copy of ``value`` in which one value somewhere is another one, or is missing."""
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.15:
        return rng.choice(OTHER_VALUES)
    result = copy.copy(value)
    key = rng.choice(list(result) if isinstance(result, dict) else range(len(result)))
    if rng.random() < 0.2:
        del result[key]
    else:
        result[key] = changed(result[key], rng)
    return result


# Ways to damage a file of a checkpoint


def change_a_value(path: Path, rng: random.Random) -> None:
    torch.save(changed(torch.load(path, weights_only=False), rng), path)


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.choice((0, 1, rng.randrange(path.stat().st_size))))


def overwrite_bytes(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 3, 100))):
        content[rng.randrange(len(content))] = rng.randrange(256)
    path.write_bytes(content)


def overwrite_text(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.choice((b"", b"text", b"\0" * 1000, rng.randbytes(300), b"\xff\n", b"x" * 100_000)))


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def replace_by_a_folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def replace_by_a_pipe(path: Path, rng: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_another_file(path: Path, rng: random.Random) -> None:
    shutil.copy(rng.choice(sorted(other for other in path.parent.glob("*.pt") if other != path)), path)


WAYS: tuple[Callable[[Path, random.Random], None], ...] = (
    *[change_a_value] * 8,
    *[overwrite_bytes] * 3,
    truncate,
    overwrite_text,
    remove,
    replace_by_a_folder,
    replace_by_a_pipe,
    replace_by_another_file,
)


WITHOUT_PIPES = tuple(way for way in WAYS if way is not replace_by_a_pipe)
"""The ways after which stock's load ends: it waits forever for a writer of a pipe."""


def damage(folder: Path, rng: random.Random, ways: Sequence[Callable[[Path, random.Random], None]]) -> str:
    """Change one file of the checkpoint in ``folder`` in one of ``ways``, and return a description of the change."""
    if rng.random() < 0.1:
        path, way = folder / "latest", rng.choice((overwrite_text, truncate, remove, replace_by_a_folder))
    else:
        path, way = rng.choice(sorted((folder / TAG).glob("*.pt"))), rng.choice(ways)
    way(path, rng)
    return f"{way.__name__} in {path.name}"


def digest_of(folder: Path) -> str:
    """Return a digest of the names and the content of all files in ``folder``."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(str(path).encode())
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Loaded:
    """Everything of an engine that a load replaces: its states, and as text its counts and hyperparameters."""

    states: Record
    counts: str

    @classmethod
    def from_engine(cls, engine: Any) -> Loaded:
        states = Record()
        collect(engine.optimizer, states)
        counts = (engine.global_steps, engine.skipped_steps, engine.global_samples, engine.lr_scheduler.state_dict())
        return cls(states, f"{counts} {[vars_of(group) for group in engine.optimizer.param_groups]}")

    def differences(self, found: Loaded) -> list[str]:
        counts = [] if self.counts == found.counts else [f"counts: {self.counts}, found {found.counts}"]
        # The states may hold any number of steps, also one that is no number.
        if [type(step) for step in found.states.numbers["step"]] != [int] * len(found.states.numbers["step"]):
            return [*counts, f"steps: {found.states.numbers['step']}"]
        return [*counts, *differences(self.states, found.states)]


def has_all_states(optimizer: Any) -> bool:
    """Return whether every sub-group has moments."""
    return all(optimizer.state[master] for master in optimizer.fp32_partitioned_groups_flat)


def vars_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a param group."""
    return {key: value for key, value in group.items() if key != "params"}


class Loader:
    """Both engines, whose states are the same, and a checkpoint of these states in the folder ``now``."""

    def __init__(self, stock: Any, ours: Any, now: Path) -> None:
        self.stock, self.ours, self.now = stock, ours, now

    def load(self, folder: Path) -> dict[str, Any]:
        """Load the damaged checkpoint, and return "refused" or "loaded", with the problems of this rank."""
        before, files = Loaded.from_engine(self.ours), digest_of(folder)
        try:
            self.ours.load_checkpoint(str(folder))
        except CheckpointError as error:
            return {
                "outcome": "refused",
                "message": str(error),
                "problems": [
                    *three_parts_missing(str(error)),
                    *before.differences(Loaded.from_engine(self.ours)),
                    *([] if digest_of(folder) == files else ["the files have changed"]),
                ],
            }
        except Exception as error:  # noqa: BLE001 (any error that is not ours is a problem)
            # Printed at once: the other ranks may wait in the load, so that the ranks cannot exchange their results.
            print(f"rank {dist.get_rank()}: {type(error).__name__}: {error}", flush=True)
            problems = [f"{type(error).__name__}: {error}", *before.differences(Loaded.from_engine(self.ours))]
            return {"outcome": "failed", "message": "", "problems": problems}
        problems = []
        self.stock.load_checkpoint(str(folder))
        # Stock creates missing states in the next update: "missing moments" of ``checkpoint_jobs.py`` tests this.
        if has_all_states(self.stock.optimizer):
            problems += Loaded.from_engine(self.stock).differences(Loaded.from_engine(self.ours))
        for engine in (self.stock, self.ours):
            engine.load_checkpoint(str(self.now))
        problems += [
            f"after the intact checkpoint: {line}" for line in before.differences(Loaded.from_engine(self.ours))
        ]
        return {"outcome": "loaded", "message": "", "problems": problems}


def three_parts_missing(message: str) -> list[str]:
    """Return a problem if an error message has no rule, no value or no remedy."""
    rule, _, remedy = message.partition("\n")
    complete = " must " in rule and "found " in rule and remedy and message.count("\n") == 1 and len(message) < 2000
    return [] if complete else [f"the message is not a rule, a value and a remedy: {message}"]


def everywhere(action: Callable[[], Any]) -> list[Any]:
    """Return the result of ``action`` on every rank."""
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, action())
    return results


def main(seed: int, count: int, *, unchecked: bool) -> None:
    world_size = dist.get_world_size()
    case = Case(name="malformed", blocks=(STRIDE_2,), world_size=world_size, steps=STEPS, clip=0.5, frozen=True)
    with shared_folder() as folder, closing_engine(case, None) as stock, closing_engine(case, STRIDE_2) as ours:
        good, now = folder / "good", folder / "now"
        for saved in (good, now):
            for engine in (stock, ours):
                train(engine, case, folder)
            stock.save_checkpoint(str(saved))
        loader = Loader(stock, ours, now)
        for number in range(count):
            rng = random.Random(f"{seed} {number}")
            damaged = folder / str(number)
            if dist.get_rank() == 0:
                shutil.copytree(good, damaged)
                done = damage(damaged, rng, WITHOUT_PIPES if unchecked else WAYS)
                print(f"checkpoint {number}: {done}", flush=True)
            dist.barrier()
            found = everywhere(partial(loader.load, damaged))
            if dist.get_rank() == 0:
                problems = [problem for rank in found for problem in rank["problems"]]
                if len({rank["outcome"] for rank in found}) > 1:
                    problems.append("the ranks disagree")
                answer({**found[0], "number": number, "damage": done, "problems": problems})
                shutil.rmtree(damaged)
        records = [train(engine, case, folder) for engine in (stock, ours)]
        found_at_end = everywhere(partial(differences, *records))
        if dist.get_rank() == 0:
            answer(
                {"outcome": "trained on", "message": "", "problems": [line for rank in found_at_end for line in rank]}
            )


if __name__ == "__main__":
    import_all()
    without_check = sys.argv[3:] == ["unchecked"]
    patched = mock.patch.object(plugin, "check_before_loading", return_value=None)
    with process_group(), patched if without_check else nullcontext():
        main(int(sys.argv[1]), int(sys.argv[2]), unchecked=without_check)
