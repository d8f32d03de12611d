"""Looks for races with seeds that nobody has tried, as long as it is told to: ``make stress MINUTES=10``.

A round is a function of its seed. The first failure ends the search, with the seed that repeats it and, where
hypothesis found it, the schedule shrunk to what is needed.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from itertools import count
from typing import Any

from tests.launch import REPOSITORY, environment, run_ranks

SCHEDULE_TESTS = [REPOSITORY / "tests" / "model", REPOSITORY / "tests" / "runtime" / "test_races.py"]
CASES_A_ROUND = 8
TIMEOUT_S = 600


def schedules(seed: int) -> str | None:
    """Random schedules on the fake device, and mutations of them: what failed, or None."""
    options = ["-p", "tests.hypothesis_profiles", "--hypothesis-profile=stress", f"--hypothesis-seed={seed}"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, *map(str, SCHEDULE_TESTS)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True)
    return None if done.returncode == 0 else done.stdout + done.stderr


def engine(seed: int) -> str | None:
    """Random cases of the whole engine on the recording accelerator."""
    world_size = 1 + seed % 3
    seeds = [str(seed * CASES_A_ROUND + number) for number in range(CASES_A_ROUND)]
    return _ranks(world_size, "tests.zero.scripts.recorded", seeds, _is_in_order)


def delays(seed: int) -> str | None:
    """Ranks and workers that sleep at random."""
    return _ranks(2 + seed % 3, "tests.zero.scripts.delayed", [str(seed)], _is_undisturbed)


def _is_in_order(answer: dict[str, Any]) -> bool:
    return not any(answer["findings"]) and not any(answer["differences"])


def _is_undisturbed(answer: dict[str, Any]) -> bool:
    return answer["same"] and not answer["differences"]


def _ranks(world_size: int, module: str, seeds: list[str], good: Any) -> str | None:
    ranks = run_ranks(world_size, ["-m", module, *seeds], timeout_s=TIMEOUT_S)
    crashed = [f"rank {rank}:\n{its.output[-5000:]}" for rank, its in enumerate(ranks) if its.returncode != 0]
    answers = ranks[0].answers()
    bad = [f"{world_size} ranks: {answer}" for answer in answers if not good(answer)]
    if not crashed and len(answers) != len(seeds):
        bad.append(f"{world_size} ranks: {len(answers)} answers for {len(seeds)} seeds")
    return "\n".join([*bad, *crashed]) or None


SEARCHES = (schedules, engine, delays)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="start no further round after that long")
    parser.add_argument("--seed", type=int, default=None, help="of the first round; at random if not given")
    options = parser.parse_args(arguments)
    first = random.randrange(10**6) if options.seed is None else options.seed
    end_s = time.monotonic() + 60 * options.minutes
    for seed in count(first):
        for search in SEARCHES:
            print(f"seed {seed}: {search.__name__} ...", flush=True)
            problem = search(seed)
            if problem is not None:
                print(problem)
                print(f"FAILED: {search.__name__} with seed {seed}. Again: make stress SEED={seed} MINUTES=0")
                return 1
        if time.monotonic() >= end_s:
            print(f"nothing found with seeds {first} to {seed}")
            return 0
    raise AssertionError("count() does not end")


if __name__ == "__main__":
    sys.exit(main())
