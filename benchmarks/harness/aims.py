"""What the project aims for, as questions to the rows: held, or how far short of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Any

from benchmarks.harness.arms import ALL_CPU, OURS_AS_IT_IS
from benchmarks.harness.rows import machine_of, told
from benchmarks.harness.sizes import ON_CPU, with_default_sub_groups

Rows = Sequence[Mapping[str, Any]]

MEASURED_BY = "`make gpu-bench PYTHON=python3` on a machine with a GPU"


@dataclass(frozen=True, kw_only=True)
class Aim:
    """The median of ``quantity``, of each arm that ``arm`` matches, in every setting with the values of ``where``, lies
    within the bounds; on a machine with a GPU, or on one of 2 cores without. ``limit``: another quantity of the same
    arm and setting, that tells where it falls short what could have been."""

    what: str
    benchmark: str
    arm: str
    quantity: str
    on_gpu: bool
    at_least: float = float("-inf")
    at_most: float = float("inf")
    limit: str = ""
    where: Mapping[str, object] = field(default_factory=dict)

    def judge(self, rows: Rows) -> Verdict | None:
        """None where nothing was measured."""
        found = [row for row in rows if self._asks_for(row)]
        if not found:
            return None
        # The one that is farthest out.
        worst = min(found, key=lambda row: min(row["median"] - self.at_least, self.at_most - row["median"]))
        return Verdict(self.at_least <= worst["median"] <= self.at_most, worst, len(found))

    def _asks_for(self, row: Mapping[str, Any]) -> bool:
        return (
            "median" in row
            and row["quantity"] == self.quantity
            and fnmatch(row["arm"], self.arm)
            and (row["gpu"] is not None if self.on_gpu else (row["gpu"], row["cores"]) == (None, 2))
            and all(row["setting"].get(key) == value for key, value in self.where.items())
        )


@dataclass(frozen=True)
class Verdict:
    holds: bool
    worst: Mapping[str, Any]
    settings: int

    def __str__(self) -> str:
        value, spread = told(self.worst)
        of = f", the farthest of {self.settings}: {self.worst['arm']}" if self.settings > 1 else ""
        return f"{value} ({spread}){of}" if spread else f"{value}{of}"


FASTER, ITERATIONS_FASTER = "updates faster than stock", "iterations faster than stock"
FASTER_BY_BYTES = "stock's bytes over its"

ALL_ON_THE_CPU = Aim(
    what="2 cores: `step()` all-CPU at least 1.6 times as fast as stock's",
    benchmark="update_phase",
    arm=ALL_CPU.name,
    quantity=FASTER,
    on_gpu=False,
    at_least=1.6,
    limit=FASTER_BY_BYTES,
    where={"sub_group_size": ON_CPU.sub_group_size},
)

AIMS = (
    ALL_ON_THE_CPU,
    replace(
        ALL_ON_THE_CPU,
        what="2 cores: the same with DeepSpeed's default size of sub-groups",
        where={"sub_group_size": with_default_sub_groups(ON_CPU).sub_group_size},
    ),
    Aim(
        what="2 cores: the iteration never slower than stock's",
        benchmark="training_step",
        arm=OURS_AS_IT_IS.name,
        quantity=ITERATIONS_FASTER,
        on_gpu=False,
        at_least=1.0,
    ),
    Aim(
        what="2 cores: where nothing can be gained at most 2 % slower",
        benchmark="overhead",
        arm=f"{OURS_AS_IT_IS.name}*",
        quantity="iteration over stock's",
        on_gpu=False,
        at_most=1.02,
    ),
    Aim(
        what="GPU, micro-batch 1: the iteration at least twice as fast as stock's",
        benchmark="training_step",
        arm=OURS_AS_IT_IS.name,
        quantity=ITERATIONS_FASTER,
        on_gpu=True,
        at_least=2.0,
        where={"micro_batch": 1, "accumulation": 1},
    ),
    Aim(
        what="GPU, micro-batch 8: at most 10 % of stock's update exposed",
        benchmark="training_step",
        arm=OURS_AS_IT_IS.name,
        quantity="exposed, of stock's update",
        on_gpu=True,
        at_most=0.1,
        where={"micro_batch": 8},
    ),
    Aim(
        what="GPU: predicted updates at most 10 % off",
        benchmark="model_error",
        arm="*",
        quantity="error of the prediction",
        on_gpu=True,
        at_least=-0.1,
        at_most=0.1,
    ),
    Aim(
        what="GPU: the update within 1.2 times the lower bound",
        benchmark="model_error",
        arm="planned",
        quantity="update over its lower bound",
        on_gpu=True,
        at_most=1.2,
    ),
)


def judged(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """What was aimed for, whether it holds, and what was measured."""
    rows = list(rows)
    lines = []
    for aim in AIMS:
        verdict = aim.judge([row for row in rows if row["benchmark"] == aim.benchmark])
        if verdict is None:
            by = MEASURED_BY if aim.on_gpu else f"`python -m benchmarks {aim.benchmark}`"
            lines.append((aim.what, "**unmeasured**", f"measured by {by}"))
        else:
            why = "" if verdict.holds else f"{_limit(aim, rows, verdict.worst)}{_traces(rows, verdict.worst)}"
            lines.append((aim.what, "holds" if verdict.holds else "**falls short**", f"{verdict}{why}"))
    return lines


def _limit(aim: Aim, rows: Rows, short: Mapping[str, Any]) -> str:
    of = ("benchmark", "date", "arm", "setting")
    found = [row for row in rows if row["quantity"] == aim.limit and all(row[key] == short[key] for key in of)]
    return "".join(f"; {aim.limit}: {told(row)[0]}" for row in found)


def _traces(rows: Rows, short: Mapping[str, Any]) -> str:
    """What shows where the time goes instead, on the same machine."""
    found = [row for row in rows if row["quantity"] == "trace" and machine_of(row) == machine_of(short)]
    links = ", ".join(f"[{row['arm']}](results/{row['said']})" for row in found)
    return f"; traces of a step: {links}" if links else "; `python -m benchmarks trace` shows where the time goes"
