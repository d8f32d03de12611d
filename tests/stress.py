"""Search for races with new random seeds until the time is over: ``make stress MINUTES=10``.

A round is a function of its seed. The first failure ends the search. It is printed with the seed that repeats it; a
schedule is shrunk to the part that is needed to fail.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.launch import REPOSITORY, environment
from tests.ranks import on_ranks
from tests.software_gpu.races.race_ranks import check_random_cases
from tests.software_gpu.ranks import software_process_group
from tests.zero.behaviour.random_calls import compare_calls
from tests.zero.on_accelerator import software_gpu
from tests.zero.process_group import process_group
from tests.zero.races.delayed_ranks import train_with_delays

SCHEDULE_TESTS = [REPOSITORY / "tests" / name for name in ("model/test_schedule.py", "runtime/test_races.py")]
CASES_PER_ROUND = 8
TIMEOUT_S = 1800


def schedules(seed: int) -> str | None:
    options = ["-p", "tests.tiers", "--hypothesis-profile=stress", f"--hypothesis-seed={seed}"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, *map(str, SCHEDULE_TESTS)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
    return None if done.returncode == 0 else done.stdout + done.stderr


def engine(seed: int) -> str | None:
    seeds = range(seed * CASES_PER_ROUND, (seed + 1) * CASES_PER_ROUND)
    return failure_of(1 + seed % 3, check_random_cases, seeds, group=software_process_group)


def delays(seed: int) -> str | None:
    return failure_of(2 + seed % 3, train_with_delays, [seed])


def sequences(seed: int) -> str | None:
    group = (process_group, partial(software_gpu, "lazy"), partial(software_gpu, "jitter"))[seed % 3]
    return failure_of(1 + seed // 3 % 2, compare_calls, [seed], group=group)


def failure_of(world_size: int, function: Callable[..., object], *arguments: Any, **options: Any) -> str | None:
    try:
        on_ranks(world_size, function, *arguments, timeout_s=TIMEOUT_S, **options)
    except pytest.fail.Exception as failure:
        return str(failure)
    return None


SEARCHES = (schedules, engine, delays, sequences)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="start no new round after this many minutes")
    parser.add_argument("--seed", type=int, default=None, help="seed of the first round (default: random)")
    options = parser.parse_args(arguments)
    first = seed = random.randrange(10**6) if options.seed is None else options.seed
    end_s = time.monotonic() + 60 * options.minutes
    while seed == first or time.monotonic() < end_s:
        for search in SEARCHES:
            print(f"seed {seed}: {search.__name__} ...", flush=True)
            problem = search(seed)
            if problem is not None:
                print(f"{problem}\nFAILED: {search.__name__}. Repeat with: make stress SEED={seed} MINUTES=0")
                return 1
        seed += 1
    print(f"no failure in {seed - first} rounds, with seeds {first} to {seed - 1}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
