"""Load damaged checkpoints. Each must be refused without any effect, or loaded as stock loads it.

Two engines, stock and the plugin's, train, save, and train on. Copies of stock's checkpoint are damaged, each in one of
the ways of ``damages``. The plugin must refuse a copy by its own error on every rank, with the files and the engine as
they were, or stock must be able to load it, with the same states. At the end both engines train on.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deep_opt_states.zero.checkpoint_check import CheckpointError
from tests.ranks import on_ranks
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.parity.training import Record, closing_engine, collect, differences, shared_folder, train

STEPS = 3
TAG = f"global_step{STEPS}"

MISSING = object()
OTHER_VALUES = (None, True, -1, 10**30, math.nan, "", "text", b"\0", [], {}, {"a": 1}, (1, 2), torch.zeros(3), object)


Damage = Callable[[Path], object]


def damages(good: Path) -> dict[str, tuple[str, Damage]]:
    """Return the ways to damage a file by name, each with the name of the file in the checkpoint ``good``.

    Each entry of each file of the last rank is another value, and the outermost are missing, too.
    """
    found: dict[str, tuple[str, Damage]] = {}
    others = cycle(OTHER_VALUES)
    for kind in ("model_states.pt", "optim_states.pt"):
        path = max((good / TAG).glob(f"*{kind}"))
        file = f"{TAG}/{path.name}"
        saved = torch.load(path, weights_only=False)
        for keys in places(saved):
            found[f"another value in {kind} {keys}"] = file, partial(change, keys, next(others))
            if len(keys) == 1:
                found[f"no value in {kind} {keys}"] = file, partial(change, keys, MISSING)
        other = min(file for file in (good / TAG).glob("*.pt") if file != path)
        ways: dict[str, Damage] = {
            "an empty file": lambda path: path.write_bytes(b""),
            "half of a file": lambda path: os.truncate(path, path.stat().st_size // 2),
            "no last byte": lambda path: os.truncate(path, path.stat().st_size - 1),
            "other bytes at the start": partial(overwrite, 0.0),
            "other bytes in the structure": partial(overwrite, 0.02),
            "other bytes in the middle": partial(overwrite, 0.5),
            "other bytes at the end": partial(overwrite, 0.999),
            "no file": Path.unlink,
            "a folder": replace_by_a_folder,
            "another file": lambda path, other=other.name: shutil.copy(path.parent / other, path),
            "a pipe": replace_by_a_pipe,
        }
        found |= {f"{name} in {kind}": (file, way) for name, way in ways.items()}
    for content in (b"", b"text", b"\0" * 1000, b"\xff\n", b"x" * 100_000):
        found[f"latest holds {content[:5]!r}"] = "latest", partial(Path.write_bytes, data=content)
    found["latest is a folder"] = "latest", replace_by_a_folder
    found["no latest"] = "latest", Path.unlink
    return found


def places(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each entry, of nested ones and of lists to a few. The config is not read."""
    if keys:
        yield keys
    if isinstance(value, (dict, list)) and keys[-1:] != ("ds_config",):
        inner = list(value) if isinstance(value, dict) else list(range(len(value)))
        for key in inner if len(keys) < 2 and "module" not in keys else inner[:2]:
            yield from places(value[key], (*keys, key))


def change(keys: tuple[Any, ...], value: Any, path: Path) -> None:
    saved = torch.load(path, weights_only=False)
    *outer, last = keys
    holder = saved
    for key in outer:
        holder = holder[key]
    if value is MISSING:
        del holder[last]
    else:
        holder[last] = value
    torch.save(saved, path)


def overwrite(share: float, path: Path) -> None:
    """Replace 20 bytes after this share of the file."""
    content = bytearray(path.read_bytes())
    begin = int(share * len(content))
    content[begin : begin + 20] = b"\xa5" * len(content[begin : begin + 20])
    path.write_bytes(content)


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


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
        return cls(states, f"{counts} {[hyperparameters_of(group) for group in engine.optimizer.param_groups]}")

    def differences(self, found: Loaded) -> list[str]:
        counts = [] if self.counts == found.counts else [f"counts: {self.counts}, found {found.counts}"]
        # The states may hold any number of steps, also one that is no number.
        steps = found.states.numbers["step"]
        if [type(step) for step in steps] != [int] * len(steps):
            return [*counts, f"steps: {steps}"]
        return [*counts, *differences(self.states, found.states)]


def hyperparameters_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def has_all_states(optimizer: Any) -> bool:
    """Return whether every sub-group has moments."""
    return all(optimizer.state[master] for master in optimizer.fp32_partitioned_groups_flat)


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
        # Stock creates missing states in the next update: the job "missing moments" tests this.
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
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, action())
    return results


def load_damaged_checkpoints() -> list[dict[str, Any]]:
    """Return the finding of all ranks for each damaged checkpoint, and for training on."""
    case = Case(name="malformed", blocks=(STRIDE_2,), world_size=2, steps=STEPS, clip=0.5, frozen=True)
    found = []
    with shared_folder() as folder, closing_engine(case, None) as stock, closing_engine(case, STRIDE_2) as ours:
        good, now = folder / "good", folder / "now"
        for saved in (good, now):
            for engine in (stock, ours):
                train(engine, case, folder)
            stock.save_checkpoint(str(saved))
        loader = Loader(stock, ours, now)
        for number, (name, (file, way)) in enumerate(damages(good).items()):
            damaged = folder / str(number)
            if dist.get_rank() == 0:
                shutil.copytree(good, damaged)
                way(damaged / file)
                print(f"checkpoint {number}: {name}", flush=True)
            dist.barrier()
            of_ranks = everywhere(partial(loader.load, damaged))
            problems = [problem for rank in of_ranks for problem in rank["problems"]]
            if len({rank["outcome"] for rank in of_ranks}) > 1:
                problems.append("the ranks disagree")
            found.append({"damage": name, "outcome": of_ranks[0]["outcome"], "problems": problems})
            if dist.get_rank() == 0:
                shutil.rmtree(damaged)
        records = [train(engine, case, folder) for engine in (stock, ours)]
        problems = [line for lines in everywhere(partial(differences, *records)) for line in lines]
    return [*found, {"outcome": "trained on", "problems": problems}]


@pytest.mark.P4
@pytest.mark.P6
def test_a_damaged_checkpoint_is_refused_or_loaded_as_by_stock_and_training_goes_on() -> None:
    """Check it on two ranks, of which one alone finds the damage."""
    found = on_ranks(2, load_damaged_checkpoints, timeout_s=600)[0]
    assert [one for one in found if one["problems"]] == []
    outcomes = [one["outcome"] for one in found]
    assert outcomes.pop() == "trained on"
    assert outcomes.count("refused") > len(outcomes) / 2
    assert outcomes.count("loaded") > len(outcomes) / 10
