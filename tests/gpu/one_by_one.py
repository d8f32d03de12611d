"""Run several test cases in one process, because a process takes seconds to start, and report each failure separately.

The result of a case that raises is its traceback. If a case ends the process, only the result of this case is lost: a
new process continues with the next case.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.launch import Finished, answer, run_ranks


def answer_each(work: Mapping[str, Callable[[], dict[str, Any]]], names: Sequence[str]) -> None:
    """Do the work of each name in this process, and answer with its result or with its traceback."""
    for name in names:
        try:
            found = work[name]()
        except Exception:  # noqa: BLE001 (the case's test fails with it)
            found = {"error": traceback.format_exc()}
        answer({"name": name, **found})


@dataclass
class Answers:
    """The answers of all cases; ``ending`` is the output of a process that failed after its last case."""

    by_name: dict[str, dict[str, Any]] = field(default_factory=dict)
    ending: str = ""

    def result(self, name: str) -> dict[str, Any]:
        """Return the result of a case, or fail the calling test if there is none."""
        found = self.by_name[name]
        if "error" in found:
            pytest.fail(f"{name}:\n{found['error']}", pytrace=False)
        return found


def run_each(program: Sequence[str], names: Sequence[str], timeout_s: float, **changes: str) -> Answers:
    """Start ``program``, which passes its arguments to ``answer_each``, until each case of ``names`` has run."""
    answers, left = Answers(), list(names)
    end_s = time.monotonic() + timeout_s
    while left:
        left_s = max(1.0, end_s - time.monotonic())
        # A forked process could not use CUDA if the process that it is forked from has initialized it.
        (finished,) = run_ranks(1, [*program, *left], timeout_s=left_s, fresh=True, **changes)
        answered = _answered(finished)
        answers.by_name |= answered
        left = [name for name in left if name not in answered]
        ending = f"the process ended with {finished.returncode}:\n{finished.output[-5000:]}"
        if left:
            answers.by_name[left.pop(0)] = {"error": ending}
        elif finished.returncode != 0:
            answers.ending = ending
        # If no case of the process has answered, the process probably fails for every case: do not start another one.
        if not answered or time.monotonic() >= end_s:
            answers.by_name |= {name: {"error": f"the case was not started, because {ending}"} for name in left}
            break
    return answers


def _answered(finished: Finished) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for line in finished.output.splitlines():
        # The last line may be incomplete.
        with suppress(json.JSONDecodeError):
            found |= {case["name"]: case for case in Finished(finished.returncode, line).answers()}
    return found
