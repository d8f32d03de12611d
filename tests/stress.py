"""Looks for races with seeds that nobody has tried, as long as it is told to: ``make stress MINUTES=10``.

A round is a function of its seed. The first failure ends the search, with the seed that repeats it and the schedule,
shrunk to what is needed.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from typing import Any

from tests.launch import REPOSITORY, Finished, environment, run_ranks
from tests.zero.parity.random_case import SIMPLER

SCHEDULE_TESTS = [REPOSITORY / "tests" / name for name in ("model/test_schedule.py", "runtime/test_races.py")]
CASES_A_ROUND = 8
TIMEOUT_S = 1800


def schedules(seed: int) -> str | None:
    """Random schedules on the fake device, and mutations of them: what failed, or None. Hypothesis shrinks."""
    options = ["-p", "tests.hypothesis_profiles", "--hypothesis-profile=stress", f"--hypothesis-seed={seed}"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, *map(str, SCHEDULE_TESTS)]
    try:
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        return f"{error}\n{(error.output or b'').decode()}"
    return None if done.returncode == 0 else done.stdout + done.stderr


def engine(seed: int) -> str | None:
    """Random cases of the whole engine on the recording accelerator."""
    world_size = 1 + seed % 3
    cases = [str(seed * CASES_A_ROUND + number) for number in range(CASES_A_ROUND)]
    problem = recorded(world_size, cases)
    if problem is None:
        return None
    for case in cases:
        alone = recorded(world_size, [case])
        if alone is not None:
            return shrunk(world_size, case, alone)
    return problem


def shrunk(world_size: int, case: str, problem: str) -> str:
    """The last problem found while whatever is not needed for one was taken away."""
    for name in SIMPLER:
        found = recorded(world_size, [f"{case},{name}"])
        if found is not None:
            case, problem = f"{case},{name}", found
    return f"{problem}\n{world_size} ranks: python -m tests.zero.scripts.recorded {case}"


def recorded(world_size: int, cases: list[str]) -> str | None:
    ranks = run_ranks(world_size, ["-m", "tests.zero.scripts.recorded", *cases], timeout_s=TIMEOUT_S)
    bad = [told(answer) for answer in ranks[0].answers() if any(answer["findings"]) or any(answer["differences"])]
    return _problem(ranks, bad, len(cases))


def told(answer: dict[str, Any]) -> str:
    lines = [f"{answer['case']}, {answer['block']}", answer["schedule"]]
    for rank, (findings, differences) in enumerate(zip(answer["findings"], answer["differences"], strict=True)):
        lines += [f"rank {rank}: {found}" for found in (*findings, *differences)]
    return "\n".join(lines)


def delays(seed: int) -> str | None:
    """Ranks and workers that sleep at random."""
    ranks = run_ranks(2 + seed % 3, ["-m", "tests.zero.scripts.delayed", str(seed)], timeout_s=TIMEOUT_S)
    bad = [str(answer) for answer in ranks[0].answers() if not answer["same"] or answer["differences"]]
    return _problem(ranks, bad, 1)


def sequences(seed: int) -> str | None:
    """Whatever is called between updates, against stock."""
    ranks = run_ranks(1 + seed % 2, ["-m", "tests.zero.scripts.sequences", str(seed)], timeout_s=TIMEOUT_S)
    bad = [str(answer) for answer in ranks[0].answers() if answer["differences"]]
    return _problem(ranks, bad, 1)


def _problem(ranks: list[Finished], bad: list[str], expected: int) -> str | None:
    """What is bad, and the output of ranks that crashed or said too little."""
    told_by_first = len(ranks[0].answers())
    if told_by_first != expected or any(rank.returncode != 0 for rank in ranks):
        bad.append(f"{told_by_first} answers of {expected}")
        bad += [f"rank {number}, {rank.returncode}:\n{rank.output[-5000:]}" for number, rank in enumerate(ranks)]
    return "\n".join(bad) or None


SEARCHES = (schedules, engine, delays, sequences)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="start no further round after that long")
    parser.add_argument("--seed", type=int, default=None, help="of the first round; at random if not given")
    options = parser.parse_args(arguments)
    first = seed = random.randrange(10**6) if options.seed is None else options.seed
    end_s = time.monotonic() + 60 * options.minutes
    while True:
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
        seed += 1


if __name__ == "__main__":
    sys.exit(main())
