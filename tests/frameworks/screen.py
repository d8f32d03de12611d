"""Check the lines of the plugin on the screen: in a process of its own, or in one of several runs in a process."""

from __future__ import annotations

import re

from tests.launch import Finished

OURS = "[deep_opt_states]"
"""The beginning of our lines in the log."""

CORES = r"CPU update on rank 0: \d+ threads?\b"
PLAN = r"\d+ units, [\d,]+ parameters: .* plan \w+"
NOTHING_IS_STREAMED = r"\. Nothing is streamed: the accelerator is the CPU, .*$"
MEASURED = "hardware profile for this machine yet|hardware profile is not cached"
"""A part of the lines that state that a profile is measured."""

WITHOUT_OPTIMIZER = "an engine without an optimizer runs as stock DeepSpeed"
"""A part of the line of a reference model, which precedes the lines of the engine that trains."""


def check_first_lines(written: str, count: int) -> None:
    """Check that the first ``count`` lines of a process contain the plugin's first two: the cores, and the whole plan.

    The process has ``written`` this without a GPU and with an empty block, so the plan has the reason why nothing is
    streamed. The lines about the measurement of a profile are not counted: only the first start on a machine has them.
    """
    lines = [line for line in lines_on_screen(written) if not re.search(MEASURED, line)][:count]
    ours = [line.partition(OURS)[2].strip() for line in lines if OURS in line]
    cores, plan, *_ = (line for line in ours if not line.startswith(WITHOUT_OPTIMIZER))
    assert re.match(CORES, cores)
    assert re.match(PLAN + NOTHING_IS_STREAMED, plan)


def lines_on_screen(written: str) -> list[str]:
    """Return the lines that a terminal shows. After a carriage return the line is replaced, as in a progress bar."""
    return [line.rstrip("\r").rpartition("\r")[2] for line in written.split("\n")]


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
        assert re.search(rf"{PLAN}$", plan)
        assert re.search(r"[1-9]\d* streamed", plan)
    assert all("updates in the order in which forward uses the parameters" in line for line in ours[2 * engines :])
