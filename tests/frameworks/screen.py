"""Check the lines of the plugin in the output of a process in which several runs take turns."""

from __future__ import annotations

import re

from tests.launch import Finished

OURS = "[deep_opt_states]"
"""The beginning of our lines in the log."""

CORES = r"CPU update on rank 0: \d+ threads?\b"
PLAN = r"\d+ units, [\d,]+ parameters: .* plan \w+$"


def begin_run(name: str, variant: str) -> None:
    """Print the line with which a run begins, in a process of several."""
    print(f"run {name} with {variant}", flush=True)


def lines_of(finished: Finished, name: str, variant: str) -> list[str]:
    """Return the lines of one run."""
    _, found = finished.output.split(f"run {name} with {variant}\n")
    return re.split(r"^run [\w -]+ with (?:stock|plugin)$", found, flags=re.MULTILINE)[0].splitlines()


def check_lines_of_engines(lines: list[str], engines: int = 1) -> None:
    """Check that two lines of each engine are ours: that the plugin is on, and what it planned.

    After the first step of an engine, one more line states that updates follow the order of forward.
    """
    ours = [line for line in lines if OURS in line]
    assert len(ours) >= 2 * engines
    for cores, plan in zip(ours[0 : 2 * engines : 2], ours[1 : 2 * engines : 2], strict=True):
        assert re.search(CORES, cores)
        assert re.search(PLAN, plan)
        assert re.search(r"[1-9]\d* streamed", plan)
    assert all("updates in the order in which forward uses the parameters" in line for line in ours[2 * engines :])
