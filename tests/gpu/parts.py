"""List the parts of ``make gpu-check`` and ``make gpu-measure``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

HANG_S = 25
"""pytest writes the stacks of a test that runs for this long, and lets it continue."""

PART_ENDS = "GPU_CHECK_PART_ENDS"
"""The environment variable with the ``time.time()`` at which ``run_parts.py`` will stop a part, and the part's name."""

REPORT_S = 4.0
"""The time that pytest needs to write a failure, and the process group to end."""

ALONE_S = 120.0
"""The limit for a test that is run without ``run_parts.py``."""


def seconds_left() -> float:
    """Return the seconds that a test may still wait for a process, at least 1, so that it reports before its end."""
    ends = os.environ.get(PART_ENDS)
    return ALONE_S if ends is None else max(1.0, float(ends.split()[0]) - time.time() - REPORT_S)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A command with a time limit."""

    name: str
    command: tuple[str, ...]
    limit_s: float


def pytest_command(path: str, keyword: str = "") -> tuple[str, ...]:
    """Return a pytest command that prints the name of each test before it runs and its traceback when it fails."""
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


def _tests(name: str, file: str, keyword: str = "", *, limit_s: float) -> Part:
    return Part(name=name, command=pytest_command(f"tests/gpu/{file}.py", keyword), limit_s=limit_s)


def parts() -> list[list[Part]]:
    """Return the groups of parts of ``make gpu-check``: the build, which the others need, and last those that measure.

    The parts of a group measure no time, and run at the same time, since a machine with a GPU has many cores.
    """
    measure_no_time = [
        _tests("kernel", "test_kernel", limit_s=260),
        _tests("executor", "test_executor", limit_s=260),
        _tests("placements", "test_engine", "placements", limit_s=100),
        _tests("long", "test_engine", "long", limit_s=170),
        _tests("engine", "test_engine", "not placements and not long", limit_s=170),
    ]
    streams = _tests("streams", "test_streams", "not profile", limit_s=60)
    return [[BUILD], measure_no_time, [streams], [_tests("profile", "test_streams", "profile", limit_s=60)]]


def measure_parts() -> list[list[Part]]:
    """Return the parts of ``make gpu-measure``: small benchmarks at full effort, whose rows are in OUT if it is set."""
    output = ("--output", os.environ["OUT"]) if os.environ.get("OUT") else ()
    program = (sys.executable, "-m", "benchmarks")
    limits_s = {"copy": 45, "adam": 90}
    return [[BUILD], *([Part(name=name, command=(*program, name, *output), limit_s=s)] for name, s in limits_s.items())]


def chosen_parts(listed: Sequence[Sequence[Part]], names: Sequence[str]) -> list[list[Part]]:
    """Return the listed parts with these names, or all if there are no names.

    Raise ``SystemExit`` for a name that is not listed.
    """
    known = [part.name for group in listed for part in group]
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"No part has the name {unknown[0]!r}. The parts are: {', '.join(known)}.")
    chosen = [[part for part in group if not names or part.name in names] for group in listed]
    return [group for group in chosen if group]
