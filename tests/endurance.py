"""Train thousands of steps, and check that the process keeps no more memory or files: ``python -m tests.endurance``.

With ``--leak``, something is kept on purpose, to show that the check finds it.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass

from tests.launch import run_ranks

SECONDS_PER_STEP = 2
START_S = 300
LEAKS = ("none", "host", "accelerator", "open file", "temporary file", "every")


@dataclass(frozen=True, kw_only=True)
class LongTraining:
    """The number of steps that were trained, the growth in words, and the problems: growing quantities, or a crash."""

    steps: int
    summary: str
    problems: tuple[str, ...]


def train(steps: int, seed: int, leak: str) -> LongTraining:
    """Train so many steps, and return the memory and the files that the process has kept."""
    script = ["-m", "tests.software_gpu.training.endurance_ranks", str(seed), str(steps), leak]
    (finished,) = run_ranks(1, script, timeout_s=START_S + SECONDS_PER_STEP * steps)
    if finished.returncode != 0 or not finished.answers():
        return LongTraining(steps=0, summary="", problems=(finished.output[-4000:],))
    (found,) = finished.answers()
    lines = [
        f"{name}: {growth:.4g} per step, {found['first'][name]:,} to {found['last'][name]:,}"
        for name, growth in found["growth"].items()
    ]
    counts = (
        f"{found['skipped']} skipped steps, {found['evaluated']} evaluations, {found['samples']} saves and loads, "
        f"{sum(found['moved']['kinds'].values())} moves of units"
    )
    return LongTraining(
        steps=found["steps"],
        summary="; ".join([counts, *lines]),
        problems=tuple(f"{name} grows by {found['growth'][name]:.4g} per step" for name in found["grown"]),
    )


def main(arguments: list[str] | None = None) -> int:
    """Train. Return the exit code: 1 if something grows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=None, help="default: random")
    parser.add_argument("--leak", choices=LEAKS, default="none")
    options = parser.parse_args(arguments)
    seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}: {options.steps} steps ...", flush=True)
    found = train(options.steps, seed, options.leak)
    print(found.summary.replace("; ", "\n"))
    for problem in found.problems:
        print(f"FAILED: {problem}")
    return int(bool(found.problems))


if __name__ == "__main__":
    sys.exit(main())
