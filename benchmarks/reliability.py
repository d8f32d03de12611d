"""Do runs survive kills and thousands of steps, and does a long search find a race?

Each variant repeats a check of the tests with new seeds, for hours: ``--set minutes=10`` and the other parameters of
``measure`` make it shorter. The steps and the sequences train on the GPU in software of the tests, everything else on
the CPU accelerator. Some checks run at the same time, each in a process of its own. The speed of these runs means
nothing; their duration only shows how much was tried.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial

from benchmarks.harness.charts import Bars
from benchmarks.harness.rows import Row
from tests import endurance, stress
from tests.kills import kill_runs, summary

CHART = Bars("duration")


@dataclass(frozen=True, kw_only=True)
class CheckCounts:
    """The number of things that were tried, those that failed, and in words what else was counted."""

    tried: int
    failures: int
    counted: str
    problem: str = ""


def measure(
    *,
    quick: bool,
    kills: int = 200,
    decoupled_kills: int = 200,
    steps: int = 10_000,
    minutes: float = 60,
    seed: int = 1,
    jobs: int = 3,
) -> Iterator[Row]:
    """Yield for each check how often it was tried, how often it failed, and for how long, as soon as it has ended.

    ``minutes`` is the duration of each of the two searches for races. ``jobs`` checks run at the same time.
    """
    if quick:
        kills, decoupled_kills, steps, minutes = 3, 1, 300, 0
    variants: dict[str, Callable[[], CheckCounts]] = {
        "rounds of make stress": partial(_searched, minutes, seed, stress.SEARCHES),
        "sequences, lazy software GPU": partial(_searched, minutes, seed, (stress.sequences_on_lazy_gpu,)),
        "kills, 2 ranks": partial(_killed, kills, seed, "data parallel"),
        "kills, decoupled writer": partial(_killed, decoupled_kills, seed, "decoupled"),
        "steps, software GPU": partial(_trained, steps, seed),
    }
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as processes:
        running = {processes.submit(_timed, run): variant for variant, run in variants.items()}
        for ended in as_completed(running):
            yield from _rows(running[ended], {"seed": seed, "jobs": jobs}, *ended.result())


def _timed(run: Callable[[], CheckCounts]) -> tuple[CheckCounts, float]:
    """Return what a check has found, and its duration in seconds.

    A check that raises counts as a failure, so that the results of the others are kept.
    """
    start_s = time.monotonic()
    try:
        found = run()
    except Exception:  # noqa: BLE001 (whatever a check raises is its first failure)
        found = CheckCounts(tried=0, failures=1, counted="ended by an error", problem=traceback.format_exc())
    return found, time.monotonic() - start_s


def _rows(variant: str, setting: dict[str, int], found: CheckCounts, duration_s: float) -> Iterator[Row]:
    yield Row(variant=variant, setting=setting, quantity="tried", value=f"{found.tried:,}")
    yield Row(variant=variant, setting=setting, quantity="failures", value=f"{found.failures:,}")
    yield Row(variant=variant, setting=setting, quantity="no failure", value=found.failures == 0, claimed=True)
    yield Row(variant=variant, setting=setting, quantity="duration", unit="s", samples=[duration_s])
    yield Row(variant=variant, setting=setting, quantity="counted", value=found.counted)
    if found.problem:
        yield Row(variant=variant, setting=setting, quantity="first failure", value=found.problem[-4000:])


def _killed(kills: int, seed: int, training: str) -> CheckCounts:
    found, output = kill_runs(kills, seed, training)
    problems = [kill["problem"] for kill in found if kill["problem"]] + ([output] if output else [])
    return CheckCounts(tried=len(found), failures=len(problems), counted=summary(found), problem="".join(problems[:1]))


def _trained(steps: int, seed: int) -> CheckCounts:
    found = endurance.train(steps, seed, "none")
    return CheckCounts(
        tried=found.steps, failures=len(found.problems), counted=found.summary, problem="".join(found.problems[:1])
    )


def _searched(minutes: float, seed: int, searches: tuple[stress.Search, ...]) -> CheckCounts:
    found = stress.search_for(minutes, seed, searches)
    return CheckCounts(
        tried=found.rounds,
        failures=int(found.failed is not None),
        counted=f"{found.rounds} rounds of {', '.join(search.__name__ for search in searches)}",
        problem=f"{found.failed}, round {found.rounds}: {found.problem}" if found.failed else "",
    )
