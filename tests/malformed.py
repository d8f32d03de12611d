"""Give malformed configs, profiles and checkpoints to the engine: ``python -m tests.malformed``.

Half of the inputs are blocks and profiles for an engine, and half are checkpoints on two ranks. Each must be used, or
refused by an error with the rule, the value found and the remedy, and nothing may be lost: files are as they were, and
training goes on with the bits of stock.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass

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


PARTS: tuple[tuple[Callable[[int, int], Tried], float], ...] = ((configs, 0.5), (checkpoints, 0.5))
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
