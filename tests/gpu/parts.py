"""List the parts of ``make gpu-check`` and ``make gpu-measure``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

HANG_S = 25
"""pytest writes the stacks of a test that runs for this long, and lets it continue."""

PART_ENDS = "GPU_CHECK_PART_ENDS"
"""The environment variable with the time at which ``run_parts.py`` will stop a part, as ``time.time()``."""

REPORT_S = 4.0
ALONE_S = 120.0


def seconds_left() -> float:
    """Return the seconds that a test may still wait for a process, at least 1, so that it reports before its end."""
    ends = os.environ.get(PART_ENDS)
    return ALONE_S if ends is None else max(1.0, float(ends) - time.time() - REPORT_S)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A command with a time limit, which ``runs_beside`` its neighbours in the list that measure no time either."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    runs_beside: bool = False


def pytest_command(path: str, keyword: str = "") -> tuple[str, ...]:
    shown = ("-p", "no:cacheprovider", "-vv", "-rs", "--tb=short", "-o", f"faulthandler_timeout={HANG_S}")
    return (sys.executable, "-m", "pytest", *shown, *(("-k", keyword) if keyword else ()), path)


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


def _tests(name: str, file: str, keyword: str = "", *, limit_s: float, runs_beside: bool = True) -> Part:
    command = pytest_command(f"tests/gpu/{file}.py", keyword)
    return Part(name=name, command=command, limit_s=limit_s, runs_beside=runs_beside)


def parts() -> list[Part]:
    return [
        BUILD,
        _tests("kernel", "test_kernel", limit_s=240),
        _tests("executor", "test_executor", "not billion and not sanitizer", limit_s=240),
        _tests("large", "test_executor", "billion", limit_s=60),
        _tests("sanitizer", "test_executor", "sanitizer", limit_s=60),
        _tests("placements", "test_engine", "placements", limit_s=80),
        _tests("long", "test_engine", "long", limit_s=150),
        _tests("processes", "test_engine", "processes", limit_s=80),
        _tests("engine", "test_engine", "not placements and not long and not processes", limit_s=150),
        _tests("streams", "test_streams", "not profile", limit_s=60, runs_beside=False),
        _tests("profile", "test_streams", "profile", limit_s=60, runs_beside=False),
    ]


def side_by_side(chosen: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield the parts that run at the same time: neighbours that may run concurrently, or one part alone."""
    for runs_beside, group in groupby(chosen, key=lambda part: part.runs_beside):
        if runs_beside:
            yield list(group)
        else:
            yield from ([part] for part in group)


def measure_parts() -> list[Part]:
    """Return the parts of ``make gpu-measure``: small benchmarks at full effort, whose rows are in OUT if it is set."""
    output = ("--output", os.environ["OUT"]) if os.environ.get("OUT") else ()
    program = (sys.executable, "-m", "benchmarks")
    limits_s = {"copy": 45, "adam": 90}
    return [BUILD, *(Part(name=name, command=(*program, name, *output), limit_s=s) for name, s in limits_s.items())]


def chosen_parts(listed: Sequence[Part], names: Sequence[str]) -> list[Part]:
    known = [part.name for part in listed]
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"No part has the name {unknown[0]!r}. The parts are: {', '.join(known)}.")
    return [part for part in listed if not names or part.name in names]
