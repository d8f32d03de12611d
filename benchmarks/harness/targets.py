"""Check the project's performance targets against the rows: each is met, missed, or not measured yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Any

from benchmarks.harness.rows import EMULATED, format_row, format_with_spread, machine_of
from benchmarks.harness.sizes import ON_CPU, with_default_sub_groups
from benchmarks.harness.variants import ALL_CPU, OURS_DEFAULT

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Target:
    """Bounds for the median of ``quantity``; an answer counts as 1 if it is yes and as 0 if it is no.

    The target concerns all rows whose benchmark and variant match the patterns ``benchmark`` and ``variant`` and whose
    setting has the values of ``where``. It is met if the median of each of these rows is within the bounds. It applies
    either to machines with a GPU, or to machines with 2 cores and no GPU, depending on ``on_gpu``. ``limit`` names
    another quantity of the same variant and setting. If the target is missed, that quantity shows the value that would
    have been possible.
    """

    description: str
    benchmark: str
    variant: str
    quantity: str
    on_gpu: bool
    at_least: float = float("-inf")
    at_most: float = float("inf")
    limit: str = ""
    where: Mapping[str, object] = field(default_factory=dict)

    def check(self, rows: Rows) -> Verdict | None:
        """Return the verdict, or None if no row measures the quantity."""
        found = [row for row in rows if self._applies_to(row)]
        if not found:
            return None
        # The worst row is the one with the smallest margin, or the farthest out of bounds.
        worst = min(found, key=self._margin)
        return Verdict(self._margin(worst) >= 0, worst, len(found))

    def _margin(self, row: Mapping[str, Any]) -> float:
        """Return how far the row is within the bounds, or a negative number if it is out of bounds."""
        measured = _measured(row)
        assert measured is not None
        return min(measured - self.at_least, self.at_most - measured)

    def _applies_to(self, row: Mapping[str, Any]) -> bool:
        return (
            _measured(row) is not None
            and row["quantity"] == self.quantity
            and fnmatch(row["benchmark"], self.benchmark)
            and fnmatch(row["variant"], self.variant)
            and (row["gpu"] is not None if self.on_gpu else (row["gpu"], row["cores"]) == (None, 2))
            and all(row["setting"].get(key) == value for key, value in self.where.items())
        )


def _measured(row: Mapping[str, Any]) -> float | None:
    """Return the median of a row, its answer as 1 or 0, or None if the row has neither."""
    value = row.get("median", row.get("value"))
    return None if value is None or isinstance(value, str) else float(value)


@dataclass(frozen=True)
class Verdict:
    """Whether a target is met, the row with the smallest margin, and the number of rows that were checked."""

    is_met: bool
    worst: Mapping[str, Any]
    count: int

    def __str__(self) -> str:
        chosen = f", the worst of {self.count} results (variant: {self.worst['variant']})" if self.count > 1 else ""
        return f"{format_with_spread(self.worst)}{chosen}"


UPDATE_SPEEDUP, ITERATION_SPEEDUP = "update speedup over stock", "iteration speedup over stock"
COST, COST_SHARE, RETAINED = "cost of the update", "cost / stock's cost", "retained"
BIT_IDENTICAL = "bit-identical to stock"
"""The quantity of the rows that compare losses and weights with stock's."""

EMULATED_H100 = f"{EMULATED} h100-pcie5, 4 GPUs"
EMULATED_BIT_IDENTICAL = f"{BIT_IDENTICAL} ({EMULATED})"
EMULATED_SPEEDUP = f"{EMULATED} {ITERATION_SPEEDUP}"
EMULATED_COST, EMULATED_COST_SHARE = f"{EMULATED} {COST}", f"{EMULATED} {COST_SHARE}"
MEMORY_BOUND_SPEEDUP = "speedup if memory-bound"
"""Stock's bytes of host memory per parameter divided by the variant's."""

ON_DISK = "plugin, states on disk"
UPDATE_PER_STOCK, UPDATE_PER_BYTES = (f"{EMULATED} update / {base}" for base in ("stock's", "seconds of its bytes"))

BF16_SPEEDUP, MEMORY_SHARE = "update speedup over fp32 states", "share of the in-place bandwidth"

BF16_KERNEL = Target(
    description="2 cores: the CPU kernel with bf16 states at least 1.8 times as fast as with fp32 states",
    benchmark="adam",
    variant="CPU, ours, states bf16",
    quantity=BF16_SPEEDUP,
    on_gpu=False,
    at_least=1.8,
    where={"gradients": "no clipping"},
)

ALL_ON_THE_CPU = Target(
    description="2 cores: `step()` with all updates on the CPU at least 1.55 times as fast as stock's",
    benchmark="update_phase",
    variant=ALL_CPU.name,
    quantity=UPDATE_SPEEDUP,
    on_gpu=False,
    at_least=1.55,
    limit=MEMORY_BOUND_SPEEDUP,
    where={"sub_group_size": ON_CPU.sub_group_size},
)

EMULATED_COST_AT_MICRO_BATCH_8 = Target(
    description="EMULATED H100, micro-batch 8: cost of the update at most 10 % of stock's",
    benchmark="emulated",
    variant="planned, overlap",
    quantity=EMULATED_COST_SHARE,
    on_gpu=False,
    at_most=0.1,
    where={"machine": EMULATED_H100, "micro_batch": 8},
)

UPDATE_ON_DISK = Target(
    description="EMULATED SSD that reads and writes at once: the update at most half as long as with stock's swapper",
    benchmark="disk",
    variant=ON_DISK,
    quantity=UPDATE_PER_STOCK,
    on_gpu=False,
    at_most=0.5,
    where={"disk": f"{EMULATED} 6.5 / 5 GB/s, both at once"},
)

SAME_BITS = Target(
    description="2 cores: all of our variants have the bits of stock, in losses and weights",
    benchmark="*",
    variant=f"{OURS_DEFAULT.name}*",
    quantity=BIT_IDENTICAL,
    on_gpu=False,
    at_least=1,
)

TARGETS = (
    SAME_BITS,
    replace(
        SAME_BITS,
        description="EMULATED: all arms have the bits of stock",
        benchmark="emulated",
        variant="*",
        quantity=EMULATED_BIT_IDENTICAL,
    ),
    replace(SAME_BITS, description="GPU: all of our variants have the bits of stock", on_gpu=True),
    ALL_ON_THE_CPU,
    replace(
        ALL_ON_THE_CPU,
        description="2 cores: the same with DeepSpeed's default sub-group size",
        where={"sub_group_size": with_default_sub_groups(ON_CPU).sub_group_size},
    ),
    Target(
        description="2 cores: the iteration never slower than stock's",
        benchmark="training_step",
        variant=OURS_DEFAULT.name,
        quantity=ITERATION_SPEEDUP,
        on_gpu=False,
        at_least=1.0,
    ),
    Target(
        description="2 cores: at most 2 % slower where nothing can be gained",
        benchmark="overhead",
        variant=f"{OURS_DEFAULT.name}*",
        quantity="iteration / stock's iteration",
        on_gpu=False,
        at_most=1.02,
    ),
    Target(
        description="2 cores: forward and backward of 36 tiny layers with no update in flight at most 3 % slower",
        benchmark="hooks",
        variant="ours*",
        quantity="forward + backward / stock's",
        on_gpu=False,
        at_most=1.03,
    ),
    Target(
        description="2 cores: units cost at most 2 % of step() against sub-groups of the same size",
        benchmark="overhead",
        variant="*",
        quantity="step() / step() with sub-groups",
        on_gpu=False,
        at_most=1.02,
    ),
    Target(
        description="2 cores, 605 M parameters: the iteration with all units eager not slower than without (2 %)",
        benchmark="overhead",
        variant="*",
        quantity="iteration / iteration without eager updates",
        on_gpu=False,
        at_most=1.02,
    ),
    BF16_KERNEL,
    replace(
        BF16_KERNEL,
        description="2 cores: the same kernel within 5 % of the bandwidth of host memory",
        quantity=MEMORY_SHARE,
        at_least=0.95,
    ),
    Target(
        description="EMULATED H100, micro-batch 1: the iteration at least twice as fast as stock's",
        benchmark="emulated",
        variant="planned, overlap",
        quantity=EMULATED_SPEEDUP,
        on_gpu=False,
        at_least=2.0,
        where={"machine": EMULATED_H100, "micro_batch": 1, "states": None},
    ),
    UPDATE_ON_DISK,
    replace(
        UPDATE_ON_DISK,
        description="EMULATED SSD: the update takes at most 1.2 times as long as the disk takes for its bytes",
        quantity=UPDATE_PER_BYTES,
        at_most=1.2,
        where={},
    ),
    EMULATED_COST_AT_MICRO_BATCH_8,
    replace(
        EMULATED_COST_AT_MICRO_BATCH_8,
        description="EMULATED H100, micro-batch 1, 8 GB of GPU memory: cost of the update at most 10 % of stock's",
        where={"machine": EMULATED_H100, "micro_batch": 1, "gpu_memory_share": 0.1, "states": None},
    ),
    Target(
        description="EMULATED: error of predicted iterations at most 5 %",
        benchmark="emulated",
        variant="*",
        quantity="EMULATED iteration, prediction error",
        on_gpu=False,
        at_least=-0.05,
        at_most=0.05,
    ),
    Target(
        description="EMULATED: error of predicted exposed times at most 5 %, from the rates of the machine alone "
        "(without those below 5 % of stock's update)",
        benchmark="emulated",
        variant="*",
        quantity="EMULATED exposed, prediction error",
        on_gpu=False,
        at_least=-0.05,
        at_most=0.05,
    ),
    Target(
        description="EMULATED: error of predicted updates at most 5 %",
        benchmark="emulated",
        variant="*",
        quantity="EMULATED update, prediction error",
        on_gpu=False,
        at_least=-0.05,
        at_most=0.05,
    ),
    Target(
        description="EMULATED: all iterations in the predicted order",
        benchmark="emulated",
        variant="all arms",
        quantity="pairs of EMULATED arms in the predicted order",
        on_gpu=False,
        at_least=1.0,
    ),
    Target(
        description="2 cores: 10 s of annealing shorten the iteration of no plan by more than 1 %",
        benchmark="planner",
        variant="plans in windows",
        quantity="largest ratio of the iteration to annealing",
        on_gpu=False,
        at_most=1.01,
        where={"machines": 60},
    ),
    Target(
        description="2 cores: no plan takes more than 2 s of CPU time",
        benchmark="planner",
        variant="plans in windows",
        quantity="longest planning time (CPU), all sizes",
        on_gpu=False,
        at_most=2.0,
        where={"machines": 60},
    ),
    Target(
        description="GPU, micro-batch 1: the iteration at least twice as fast as stock's",
        benchmark="training_step",
        variant=OURS_DEFAULT.name,
        quantity=ITERATION_SPEEDUP,
        on_gpu=True,
        at_least=2.0,
        where={"micro_batch": 1, "accumulation": 1},
    ),
    Target(
        description="GPU, micro-batch 8: cost of the update at most 10 % of stock's",
        benchmark="training_step",
        variant=OURS_DEFAULT.name,
        quantity=COST_SHARE,
        on_gpu=True,
        at_most=0.1,
        where={"micro_batch": 8},
    ),
    Target(
        description="GPU: error of predicted updates without overlap at most 10 % "
        "([an earlier run on an H100 missed it](../docs/benchmarking.md#on-a-gpu))",
        benchmark="model_error",
        variant="*",
        quantity="prediction error",
        on_gpu=True,
        at_least=-0.1,
        at_most=0.1,
    ),
    Target(
        description="GPU: the update at most 1.2 times its lower bound",
        benchmark="model_error",
        variant="planned",
        quantity="update / lower bound",
        on_gpu=True,
        at_most=1.2,
    ),
)


def check_targets(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Return for each target its description, its status and the measured values."""
    rows = list(rows)
    lines = []
    for target in TARGETS:
        verdict = target.check(rows)
        if verdict is None:
            command = f"`python -m benchmarks {target.benchmark.replace('*', 'all')}`"
            where = " on a machine with a GPU" if target.on_gpu else ""
            lines.append((target.description, "**not measured**", f"run {command}{where}"))
        else:
            why = "" if verdict.is_met else f"{_limit(target, rows, verdict.worst)}{_traces(rows, verdict.worst)}"
            lines.append((target.description, "met" if verdict.is_met else "**missed**", f"{verdict}{why}"))
    return lines


def _limit(target: Target, rows: Rows, missed: Mapping[str, Any]) -> str:
    """Return the quantity ``limit`` of the row that misses the target."""
    same = ("benchmark", "date", "variant", "setting")
    found = [row for row in rows if row["quantity"] == target.limit and all(row[key] == missed[key] for key in same)]
    return "".join(f"; {target.limit}: {format_row(row)[0]}" for row in found)


def _traces(rows: Rows, missed: Mapping[str, Any]) -> str:
    """Return links to the traces of the same machine, which show where the time goes instead."""
    if EMULATED in missed["quantity"]:
        return "; [causes](../docs/benchmarking.md#emulated-machines)"
    if missed["benchmark"] == "planner":
        # A trace shows training, and not planning.
        return ""
    found = [row for row in rows if row["quantity"] == "trace" and machine_of(row) == machine_of(missed)]
    links = ", ".join(f"[{row['variant']}](results/{row['value']})" for row in found)
    return f"; traces of a step: {links}" if links else "; `python -m benchmarks trace` shows where the time goes"
