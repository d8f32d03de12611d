"""Search for races with new random seeds until the time is over: ``make stress MINUTES=10``.

A round is a function of its seed. The first failure ends the search. It is printed with the seed that repeats it, and
with the schedule, shrunk to the part that is needed to fail. With ``--only``, the rounds consist of one kind of search.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.launch import REPOSITORY, Finished, environment, run_ranks
from tests.zero.parity.random_case import SIMPLER

SCHEDULE_TESTS = [REPOSITORY / "tests" / name for name in ("model/test_schedule.py", "runtime/test_races.py")]
CASES_PER_ROUND = 8
TIMEOUT_S = 1800


def schedules(seed: int) -> str | None:
    """Run random schedules and mutations of them on the fake device. Return the failure, which Hypothesis shrinks."""
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
    """Run random cases under the race check of the GPU in software. Return the failure, shrunk, or None."""
    world_size = 1 + seed % 3
    cases = [str(seed * CASES_PER_ROUND + number) for number in range(CASES_PER_ROUND)]
    problem = run_under_race_check(world_size, cases)
    if problem is None:
        return None
    for case in cases:
        alone = run_under_race_check(world_size, [case])
        if alone is not None:
            return shrink(world_size, case, alone)
    return problem


def shrink(world_size: int, case: str, problem: str) -> str:
    """Apply each simplification that keeps the case failing. Return the last failure, and the command to repeat it."""
    for name in SIMPLER:
        found = run_under_race_check(world_size, [f"{case},{name}"])
        if found is not None:
            case, problem = f"{case},{name}", found
    return f"{problem}\n{world_size} ranks: python -m tests.software_gpu.races.race_ranks {case}"


def run_under_race_check(world_size: int, cases: list[str]) -> str | None:
    """Run the cases on the GPU in software under its race check, and return the failures, or None."""
    ranks = run_ranks(world_size, ["-m", "tests.software_gpu.races.race_ranks", *cases], timeout_s=TIMEOUT_S)
    bad = [format_answer(answer) for answer in ranks[0].answers() if any(answer["races"]) or any(answer["differences"])]
    return _problem(ranks, bad, len(cases))


def format_answer(answer: dict[str, Any]) -> str:
    """Return the case, the config block, the schedule and the races of an answer as lines."""
    lines = [f"{answer['case']}, {answer['block']}", answer["schedule"]]
    for rank, (races, differences) in enumerate(zip(answer["races"], answer["differences"], strict=True)):
        lines += [f"rank {rank}: {found}" for found in (*races, *differences)]
    return "\n".join(lines)


def delays(seed: int) -> str | None:
    """Train with ranks and workers that sleep at random. Return the failure, or None."""
    ranks = run_ranks(2 + seed % 3, ["-m", "tests.zero.races.delayed_ranks", str(seed)], timeout_s=TIMEOUT_S)
    bad = [str(answer) for answer in ranks[0].answers() if not answer["same"] or answer["differences"]]
    return _problem(ranks, bad, 1)


def sequences(seed: int) -> str | None:
    """Compare random sequences of calls between updates with stock. Return the failure, or None."""
    return _sequence(1 + seed % 2, seed)


def sequences_on_software_gpu(seed: int) -> str | None:
    """Compare the same on the GPU in software, whose streams are as late as possible, or late at random."""
    return _sequence(1 + seed // 2 % 2, seed, "--on", "software_gpu", "--adversary", ("lazy", "jitter")[seed % 2])


def sequences_on_lazy_gpu(seed: int) -> str | None:
    """Compare the same on the GPU in software, whose streams are as late as possible."""
    return _sequence(1 + seed % 2, seed, "--on", "software_gpu", "--adversary", "lazy")


def _sequence(world_size: int, seed: int, *options: str) -> str | None:
    program = ["-m", "tests.zero.behaviour.sequence_ranks", *options, str(seed)]
    ranks = run_ranks(world_size, program, timeout_s=TIMEOUT_S)
    bad = [str(answer) for answer in ranks[0].answers() if answer["differences"]]
    return _problem(ranks, bad, 1)


def _problem(ranks: list[Finished], bad: list[str], expected: int) -> str | None:
    """Return the failures, with the output of ranks that crashed or gave too few answers, or None without a failure."""
    num_answers = len(ranks[0].answers())
    if num_answers != expected or any(rank.returncode != 0 for rank in ranks):
        bad.append(f"{num_answers} answers of {expected}")
        bad += [f"rank {number}, {rank.returncode}:\n{rank.output[-5000:]}" for number, rank in enumerate(ranks)]
    return "\n".join(bad) or None


Search = Callable[[int], str | None]

SEARCHES: tuple[Search, ...] = (schedules, engine, delays, sequences, sequences_on_software_gpu)
"""The searches of a round."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The seeds of all complete rounds, the last of which may have failed: ``failed`` then names its search."""

    first_seed: int
    rounds: int
    failed: str | None = None
    problem: str = ""


def search_for(minutes: float, first_seed: int, searches: Sequence[Search]) -> SearchResult:
    """Search with successive seeds until ``minutes`` are over, or something fails. Begin at least one round."""
    end_s = time.monotonic() + 60 * minutes
    rounds = 0
    while True:
        seed = first_seed + rounds
        for search in searches:
            print(f"seed {seed}: {search.__name__} ...", flush=True)
            problem = search(seed)
            if problem is not None:
                return SearchResult(first_seed=first_seed, rounds=rounds, failed=search.__name__, problem=problem)
        rounds += 1
        if time.monotonic() >= end_s:
            return SearchResult(first_seed=first_seed, rounds=rounds)


def main(arguments: list[str] | None = None) -> int:
    """Search with successive seeds. Return the exit code: 1 after a failure."""
    choices = {search.__name__: search for search in (*SEARCHES, sequences_on_lazy_gpu)}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="start no new round after this many minutes")
    parser.add_argument("--seed", type=int, default=None, help="seed of the first round (default: random)")
    parser.add_argument("--only", choices=choices, help="the search of each round (default: all but the lazy GPU's)")
    options = parser.parse_args(arguments)
    first = random.randrange(10**6) if options.seed is None else options.seed
    found = search_for(options.minutes, first, [choices[options.only]] if options.only else SEARCHES)
    last = first + found.rounds
    if found.failed is not None:
        repeat = f"python -m tests.stress --minutes 0 --seed {last} --only {options.only}"
        print(found.problem)
        print(
            f"FAILED: {found.failed} with seed {last}. Repeat with: "
            f"{repeat if options.only else f'make stress SEED={last} MINUTES=0'}"
        )
        return 1
    print(f"no failure in {found.rounds} rounds, with seeds {first} to {last - 1}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
