"""Cases that share a process, since starting one takes seconds, and that fail one by one.

A case that raises answers with its traceback. One that ends the process is lost alone: a new process begins behind it.
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
    """Run in the process: do the work of each name, and answer with what it returns or with its traceback."""
    for name in names:
        try:
            found = work[name]()
        except Exception:  # noqa: BLE001 (the case's test fails with it)
            found = {"error": traceback.format_exc()}
        answer({"name": name, **found})


@dataclass
class Answers:
    """``of`` fails the test whose case has no result; ``ending`` is what a process said that ended badly after its last
    case."""

    by_name: dict[str, dict[str, Any]] = field(default_factory=dict)
    ending: str = ""

    def of(self, name: str) -> dict[str, Any]:
        found = self.by_name[name]
        if "error" in found:
            pytest.fail(f"{name}:\n{found['error']}", pytrace=False)
        return found


def run_each(program: Sequence[str], names: Sequence[str], timeout_s: float, **changes: str) -> Answers:
    """Start ``program``, which passes its arguments to ``answer_each``, as often as is needed for all ``names``."""
    answers, left = Answers(), list(names)
    end_s = time.monotonic() + timeout_s
    while left:
        (finished,) = run_ranks(1, [*program, *left], timeout_s=max(1.0, end_s - time.monotonic()), **changes)
        answered = _answered(finished)
        answers.by_name |= answered
        left = [name for name in left if name not in answered]
        what = f"the process ended with {finished.returncode}:\n{finished.output[-5000:]}"
        if left:
            answers.by_name[left.pop(0)] = {"error": what}
        elif finished.returncode != 0:
            answers.ending = what
        # Without any answer it is not the case that ends the process.
        if not answered or time.monotonic() >= end_s:
            answers.by_name |= {name: {"error": f"was not started, since before it {what}"} for name in left}
            break
    return answers


def _answered(finished: Finished) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for line in finished.output.splitlines():
        # The last one may have been cut off.
        with suppress(json.JSONDecodeError):
            found |= {its["name"]: its for its in Finished(finished.returncode, line).answers()}
    return found
