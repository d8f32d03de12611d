"""Give malformed configs, profiles and checkpoints to the programs and to the engine: ``python -m tests.malformed``.

Half of the inputs are files for the commands, a quarter are blocks and profiles for an engine, and a quarter are
checkpoints on two ranks. Each must be used, or refused by an error with the rule, the value found and the remedy, and
nothing may be lost: files are as they were, and training goes on with the bits of stock.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from hypothesis import given
from hypothesis import seed as seeded
from hypothesis import strategies as st

from perf_model.training_run import meta_model
from tests.cli.test_bad_input import check_fuzzed
from tests.hypothesis_profiles import generated
from tests.launch import run_ranks

SECONDS_PER_INPUT = 20
START_S = 300


@dataclass(frozen=True)
class Tried:
    """The number of inputs of a kind that were tried, and that were refused, and the problems, one line for each."""

    kind: str
    tried: int
    refused: int
    problems: tuple[str, ...]


def commands(count: int, seed: int) -> Tried:
    """Run commands with malformed profiles, models, rules, machines and tables of runs."""
    refused: list[bool] = []
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(meta_model, "_run", return_value={"error": "none"}):

        @generated(count)
        @seeded(seed)
        @given(st.data())
        def check_each(data: st.DataObject) -> None:
            try:
                refused.append(check_fuzzed(Path(folder), data))
            except Exception:  # noqa: BLE001 (any exception of a command, or of the check, is a problem)
                refused.append(False)
                problems.append(traceback.format_exc()[-2000:])

        check_each()
    return Tried("files for commands", len(refused), sum(refused), tuple(problems))


def configs(count: int, seed: int) -> Tried:
    """Make engines with malformed blocks and profiles."""
    return _on_ranks("configs and profiles of an engine", 1, "tests.zero.start.malformed_ranks", count, seed)


def checkpoints(count: int, seed: int) -> Tried:
    """Load damaged checkpoints on two ranks."""
    return _on_ranks("checkpoints", 2, "tests.zero.checkpoints.malformed_ranks", count, seed)


def _on_ranks(kind: str, world_size: int, program: str, count: int, seed: int) -> Tried:
    """Run a program that has one answer for each input, and one for training on."""
    timeout_s = START_S + SECONDS_PER_INPUT * count
    ranks = run_ranks(world_size, ["-m", program, str(seed), str(count)], timeout_s=timeout_s)
    found = ranks[0].answers()
    problems = [f"{answer}" for answer in found if answer["problems"]]
    problems += [f"rank {number}: {rank.output[-3000:]}" for number, rank in enumerate(ranks) if rank.returncode]
    return Tried(kind, max(0, len(found) - 1), sum(bool(answer["message"]) for answer in found), tuple(problems))


PARTS: tuple[tuple[Callable[[int, int], Tried], float], ...] = ((commands, 0.5), (configs, 0.25), (checkpoints, 0.25))
"""The parts with their shares of the inputs."""


def main(arguments: list[str] | None = None) -> int:
    """Try all parts. Return the exit code: 1 after a problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None, help="default: random")
    options = parser.parse_args(arguments)
    seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}: {options.inputs} inputs ...", flush=True)
    failed = False
    for part, share in PARTS:
        found = part(round(share * options.inputs), seed)
        print(f"{found.kind}: {found.tried} tried, {found.refused} refused, {len(found.problems)} problems", flush=True)
        for problem in found.problems:
            print(problem)
        failed |= bool(found.problems)
    if failed:
        print(f"FAILED. Repeat with: python -m tests.malformed --inputs {options.inputs} --seed {seed}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
