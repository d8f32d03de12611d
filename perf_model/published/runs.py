"""Read measured runs from a CSV file with the columns of ``published_runs.csv``."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from perf_model.json_input import printable, read_text, reason, shorten


class RunsError(ValueError):
    """A file of runs that cannot be used: the rule, the value found, the remedy."""


@dataclass(frozen=True, kw_only=True)
class RunSetting:
    """The inputs of the prediction of an update: two runs on one machine with equal settings should take equally long.

    ``real_params`` are those of the whole model, divided among ``ranks`` ranks, and ``sub_group_size`` is in parameters
    of one rank. ``cpu_ratio`` is the share of the sub-groups that is offloaded. ``update_stride`` is None if updates
    are not interleaved. ``layers`` and ``heads`` are None if the file lacks them.
    """

    real_params: int
    hidden: int
    ranks: int
    cpu_ratio: float
    sub_group_size: int
    update_stride: int | None
    layers: int | None = None
    heads: int | None = None


@dataclass(frozen=True, kw_only=True)
class TrainedBatch:
    """The batch that forward and backward depend on, besides the setting of the update.

    ``blocking``: the last copy of the gradients to host memory blocks backward.
    """

    layers: int
    micro_batch: int
    accumulation: int
    blocking: bool


class TrainedSetting(NamedTuple):
    """The setting of the update and the batch of a run; the batch is None if the file lacks a column of it."""

    update: RunSetting
    micro_batch: int | None
    accumulation: int | None

    def without_stride(self) -> TrainedSetting:
        """Return the setting without its stride, which is equal in all runs of one line in 1/stride."""
        return self._replace(update=replace(self.update, update_stride=None))


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """One measured run, and the names by which runs are grouped.

    ``measured_s`` are the seconds of the update. ``forward_s``, ``backward_s`` and ``iteration_s`` are measured, too,
    and ``batch`` is what they depend on; each is None if the file lacks a column of it.
    """

    machine: str
    sweep: str
    model_name: str
    tp: int
    dp: int
    setting: RunSetting
    measured_s: float
    forward_s: float | None = None
    backward_s: float | None = None
    iteration_s: float | None = None
    batch: TrainedBatch | None = None

    @property
    def trained(self) -> TrainedSetting:
        """Return what the run trains. All of its runs are fitted, or none of them."""
        batch = self.batch
        return TrainedSetting(
            self.setting, *((None, None) if batch is None else (batch.micro_batch, batch.accumulation))
        )

    @property
    def gpus_per_node(self) -> int:
        """Return the number at the start of the machine's name, as in 8xH200, or ``GPUS_PER_NODE``."""
        found = _GPUS.match(self.machine)
        return GPUS_PER_NODE if found is None else int(found[1])

    @property
    def ranks_on_node(self) -> int:
        """Return the number of ranks on each node."""
        return min(self.gpus_per_node, self.tp * self.dp)

    @property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return -(-self.tp * self.dp // self.gpus_per_node)


class Column(NamedTuple):
    """The numbers that a column accepts: from ``low`` to ``high``, and integers only if ``whole``.

    A column is ``needed`` if the update cannot be predicted without it.
    """

    low: float
    high: float
    whole: bool = False
    needed: bool = False


GPUS_PER_NODE = 4
"""The GPUs of a node if the name of the machine does not start with their number."""

_GPUS = re.compile(r"([1-9][0-9]{0,3})x")

NAMES = ("machine", "sweep", "model_name")
"""The columns with text."""

MAX_NAME = 200
"""The most characters of a name."""

NUMBERS: dict[str, Column] = {
    "real_params": Column(1, 1e13, whole=True, needed=True),
    "tp": Column(1, 1e6, whole=True, needed=True),
    "dp": Column(1, 1e6, whole=True, needed=True),
    "layers": Column(0, 1e6, whole=True),
    "hidden": Column(1, 1e5, whole=True, needed=True),
    "heads": Column(0, 1e6, whole=True),
    "global_batch": Column(0, 1e9, whole=True),
    "micro_batch": Column(0, 1e9, whole=True),
    "cpu_ratio": Column(0, 1, needed=True),
    "sub_group_size": Column(1, 1e15, whole=True, needed=True),
    "interleaved": Column(0, 1, whole=True, needed=True),
    "async_grad_flush": Column(0, 1, whole=True),
    "update_stride": Column(0, 1e6, whole=True),
    "num_iterations": Column(0, 1e9, whole=True),
    "forward_s": Column(0, 1e6),
    "backward_s": Column(0, 1e6),
    "update_s": Column(1e-6, 1e6, needed=True),
    "iteration_s": Column(0, 1e6),
    "tflops_per_gpu": Column(0, 1e6),
}
"""The columns with numbers. Fields that are not needed may be blank, missing or 0, but text in such a field shows that
the row is broken."""

REQUIRED = (*NAMES, *(name for name, column in NUMBERS.items() if column.needed), "update_stride")

MAX_SUB_GROUPS = 10_000
"""The largest number of sub-groups in a file. More show that a field is wrong by orders of magnitude."""

MAX_RUNS = 10_000
"""The largest number of runs in a file."""

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def read_runs(path: Path) -> list[MeasuredRun]:
    """Return the runs in the order of the file. Raise ``RunsError`` if the file cannot be used."""
    try:
        text = read_text(path)
    except UnicodeDecodeError as error:
        raise RunsError(
            f"{printable(path)}: must be text in UTF-8, found {error}.\nConvert the file to UTF-8."
        ) from None
    except (OSError, ValueError) as error:
        found = f"{str(path)!r}: {reason(error)}"
        raise RunsError(f"--runs: must be a readable file, found {found}.\n{_FORMAT}") from None
    return parse_runs(text, printable(path))


def parse_runs(text: str, source: str) -> list[MeasuredRun]:
    """Return the runs in ``text``. Raise ``RunsError``, which names ``source``, if the text cannot be used."""
    try:
        # Do not split the text into lines here, because a quoted field may contain a line break.
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        lines = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise RunsError(f"{source}: must be a CSV file, found a line that is not CSV: {error}.\n{_FORMAT}") from None
    if not lines:
        raise RunsError(f"{source}: must start with a line of column names, found nothing.\n{_FORMAT}")
    header = [name.strip() for name in lines[0][1]]
    for name in REQUIRED:
        if header.count(name) != 1:
            found = f"{header.count(name)} in {', '.join(header)[:200]!r}"
            raise RunsError(f"{source}: must have one column {name}, found {found}.\n{_FORMAT}")
    if len(lines) - 1 > MAX_RUNS:
        rule = f"{source}: must have at most {MAX_RUNS:,} runs, found {len(lines) - 1:,}"
        raise RunsError(f"{rule}.\nValidate fewer runs at once.")
    if len(lines) == 1:
        raise RunsError(f"{source}: must have at least one run, found only column names.\nAdd a line for each run.")
    runs = [_run(f"{source}, line {number}", header, row) for number, row in lines[1:]]
    _check_sub_groups(source, {run.setting: number for run, (number, _) in zip(runs, lines[1:], strict=True)})
    return runs


def _check_sub_groups(source: str, lines: Mapping[RunSetting, int]) -> None:
    count, line = sum(map(_sub_groups, lines)), lines[max(lines, key=_sub_groups)]
    if count > MAX_SUB_GROUPS:
        rule = f"must have at most {MAX_SUB_GROUPS:,} sub-groups per rank in all different runs together"
        remedy = (
            "A run has real_params / (tp * dp * sub_group_size); correct these fields, or validate fewer runs at once."
        )
        raise RunsError(f"{source}: {rule}, found {count:,}, most of them in line {line}.\n{remedy}")


def _sub_groups(setting: RunSetting) -> int:
    return -(-setting.real_params // (setting.ranks * setting.sub_group_size))


_FORMAT = f"A file of runs is CSV with the columns {', '.join(REQUIRED)}; benchmarks/data/README.md explains them."


def _run(where: str, header: list[str], row: list[str]) -> MeasuredRun:
    if len(row) != len(header):
        rule = f"must have a field for each of {len(header)} columns, found {len(row)} fields"
        raise RunsError(f"{where}: {rule}.\nAdd the missing ones or remove the surplus; a field may be blank.")
    fields = {name: field.strip() for name, field in zip(header, row, strict=True)}
    for name in NAMES:
        if not fields[name]:
            raise RunsError(f"{where}, {name}: must not be blank, found nothing.\nRuns are grouped by it: add a name.")
        if len(fields[name]) > MAX_NAME:
            rule = f"{where}, {name}: must have at most {MAX_NAME} characters, found {len(fields[name]):,}"
            raise RunsError(f"{rule}.\nShorten the name.")
    numbers = {
        name: _number(f"{where}, {name}", column, fields[name]) for name, column in NUMBERS.items() if fields.get(name)
    }
    for name, column in NUMBERS.items():
        if column.needed and name not in numbers:
            raise RunsError(
                f"{where}, {name}: must be a number, found nothing.\nThe update cannot be predicted without it: add it."
            )
    return MeasuredRun(
        **{name: printable(fields[name]) for name in NAMES},
        tp=int(numbers["tp"]),
        dp=int(numbers["dp"]),
        setting=_setting(where, numbers),
        measured_s=numbers["update_s"],
        # 0 seconds were not measured.
        forward_s=numbers.get("forward_s") or None,
        backward_s=numbers.get("backward_s") or None,
        iteration_s=numbers.get("iteration_s") or None,
        batch=_batch(numbers),
    )


def _batch(numbers: Mapping[str, float]) -> TrainedBatch | None:
    """Return the batch, or None if a column of it is blank, missing or 0."""
    if not all(numbers.get(name) for name in ("layers", "global_batch", "micro_batch")):
        return None
    # A blank column is a run of a later DeepSpeed, which never blocks.
    blocking = numbers.get("async_grad_flush", 1) == 0
    return TrainedBatch(
        layers=int(numbers["layers"]),
        micro_batch=int(numbers["micro_batch"]),
        accumulation=max(1, round(numbers["global_batch"] / (numbers["micro_batch"] * numbers["dp"]))),
        blocking=blocking,
    )


def _setting(where: str, numbers: Mapping[str, float]) -> RunSetting:
    stride = int(numbers.get("update_stride", 0))
    if numbers["interleaved"] and stride < 1:
        found = "nothing" if "update_stride" not in numbers else str(stride)
        raise RunsError(
            f"{where}, update_stride: must be at least 1 where interleaved is 1, found {found}.\n"
            "Give the stride of the run, or interleaved 0 if the run streamed no sub-group through the GPU."
        )
    return RunSetting(
        real_params=int(numbers["real_params"]),
        hidden=int(numbers["hidden"]),
        ranks=int(numbers["tp"]) * int(numbers["dp"]),
        cpu_ratio=numbers["cpu_ratio"],
        sub_group_size=int(numbers["sub_group_size"]),
        update_stride=stride if numbers["interleaved"] else None,
        # 0 layers and 0 heads are not known.
        layers=int(numbers.get("layers", 0)) or None,
        heads=int(numbers.get("heads", 0)) or None,
    )


def _number(where: str, column: Column, field: str) -> float:
    # Check the spelling, because float() also accepts nan, infinity, 1_000 and digits of other scripts.
    value = float(field) if _NUMBER.fullmatch(field) else math.nan
    fits = column.low <= value <= column.high and (value.is_integer() or not column.whole)
    if not fits:
        kind = "whole number" if column.whole else "number"
        rule = f"must be a {kind} from {column.low:g} to {column.high:g}"
        raise RunsError(f"{where}: {rule}, found {shorten(field)}.\nCorrect the field, or remove the run.")
    return value
