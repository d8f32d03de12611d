"""List the parts of ``make gpu-check`` and ``make gpu-measure``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tests.gpu.figures import figures_of
from tests.launch import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results"

HANG_S = 25
"""pytest writes the stacks of a test that runs for this long, and lets it continue."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A command with a time limit. The JSON lines that it appends to the file ``rows`` are its result.

    ``runs_beside``: it measures no time, and runs beside its neighbours in the list that measure none either.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    rows: Path | None = None
    runs_beside: bool = False


def pytest_command(*paths: str) -> tuple[str, ...]:
    """Return a pytest command that prints the name of each test before it runs and its traceback when it fails."""
    plugins = ("-p", "no:cacheprovider", "-p", "tests.gpu.at_once")
    shown = ("-vv", "-rs", "--tb=short", "-o", f"faulthandler_timeout={HANG_S}")
    return (sys.executable, "-m", "pytest", *plugins, *shown, *(f"tests/{path}.py" for path in paths))


def _benchmark(name: str, limit_s: float) -> Part:
    command = (sys.executable, "-m", "benchmarks", name)
    return Part(name=name, command=command, limit_s=limit_s, rows=RESULTS / f"{name}.jsonl")


BUILD = Part(
    name="build",
    command=(
        sys.executable,
        "-c",
        "from deep_opt_states.device.kernels.choice import known_arithmetic; print(known_arithmetic())",
    ),
    limit_s=110,
)
"""The part that compiles stock's Adam and the plugin's: 60 s on 2 cores, 41 s on 16. All other parts use the result."""


def _tests(name: str, *files: str, limit_s: float, runs_beside: bool = True) -> Part:
    command = pytest_command(*(f"gpu/{file}" for file in files))
    return Part(name=name, command=command, limit_s=limit_s, rows=figures_of(name), runs_beside=runs_beside)


def parts() -> list[Part]:
    """Return the parts of ``make gpu-check``: first the build, which the others need, and last those that measure."""
    return [
        BUILD,
        _tests("kernel", "test_kernel", "test_norms", limit_s=240),
        _tests("executor", "test_gpu_executor", "test_locking", limit_s=240),
        _tests("placements", "test_placements", limit_s=80),
        _tests("engine", "test_engine", limit_s=150),
        _tests("long", "test_long", limit_s=150),
        _tests("processes", "test_processes", limit_s=80),
        _tests("large", "test_large", limit_s=60),
        _tests("sanitizer", "test_sanitizer", limit_s=60),
        _tests("streams", "test_streams", limit_s=60, runs_beside=False),
        _tests("profile", "test_gpu_profile", limit_s=60, runs_beside=False),
    ]


def side_by_side(chosen: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield the parts that run at the same time: neighbours that may run beside each other, or one part alone."""
    for runs_beside, group in groupby(chosen, key=lambda part: part.runs_beside):
        if runs_beside:
            yield list(group)
        else:
            yield from ([part] for part in group)


def measure_parts() -> list[Part]:
    """Return the parts of ``make gpu-measure``: small benchmarks at full effort."""
    benchmarks = {"copy": 45, "adam": 90}
    return [BUILD, *(_benchmark(name, limit_s) for name, limit_s in benchmarks.items())]


def chosen_parts(listed: Sequence[Part], names: Sequence[str]) -> list[Part]:
    """Return the listed parts with these names, or all if there are no names.

    Raise ``SystemExit`` for a name that is not listed.
    """
    known = [part.name for part in listed]
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"No part has the name {unknown[0]!r}. The parts are: {', '.join(known)}.")
    return [part for part in listed if not names or part.name in names]
