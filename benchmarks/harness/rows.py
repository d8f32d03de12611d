"""Rows of results: one JSON object a line, with when, where and of what commit it was measured."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from deep_opt_states.host import machine
from perf_model import units

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results"
QUICK_RESULTS = REPOSITORY / ".cache" / "benchmarks"
"""They measure nothing, and must not replace a trace that was measured."""

PACKAGES = ("torch", "deepspeed", "triton", "numpy")


@dataclass(frozen=True, kw_only=True)
class Row:
    """``samples`` of a ``quantity`` in ``unit``, of an ``arm`` under a ``setting``.

    ``said`` instead of samples: what is no number, and ``waived`` why there is nothing. What is ``claimed`` must hold.
    ``trace`` is a gzipped Chrome trace, which is kept beside the rows under the name that is then said.
    """

    arm: str
    quantity: str
    unit: str = ""
    samples: Sequence[float] = ()
    said: str | bool | None = None
    waived: str | None = None
    claimed: bool = False
    trace: bytes | None = None
    setting: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        row: dict[str, object] = {"setting": dict(self.setting), "arm": self.arm, "quantity": self.quantity}
        if self.waived is not None:
            return {**row, "waived": self.waived}
        if self.said is not None:
            return {**row, "said": self.said, **({"failed": True} if self.claimed and self.said is False else {})}
        return {**row, "unit": self.unit, **spread(self.samples), "samples": len(self.samples)}


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median, and the 20th and 80th percentile by nearest rank."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {"median": median(ordered), "p20": ordered[round(0.2 * last)], "p80": ordered[round(0.8 * last)]}


COMPLETE = "complete"
"""What the last row of a run says."""


class Results:
    """Of one run of a benchmark, appended to ``<benchmark>.jsonl`` in ``folder`` as they come."""

    def __init__(self, benchmark: str, folder: Path, *, quick: bool) -> None:
        # Nothing of it is measured where the CPU trains.
        gpu = None if os.environ.get("DS_ACCELERATOR") == "cpu" else machine.gpu()
        self.path = folder / f"{benchmark}.jsonl"
        self.rows: list[dict[str, Any]] = []
        self._described = {
            "benchmark": benchmark,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": _commit(),
            "quick": quick,
            "cpu": machine.cpu_name(),
            "cores": machine.cores().usable,
            "host_memory_bytes": machine.memory().usable_bytes,
            "gpu": None if gpu is None else gpu.name,
            "gpu_memory_bytes": None if gpu is None else gpu.memory_bytes,
            "versions": {"python": platform.python_version()} | _versions(),
        }

    def add(self, row: Row) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if row.trace is not None:
            name = f"{self.path.stem}-{machine_of(self._described)}-{file_name_of(row.arm)}.json.gz"
            self.path.with_name(name).write_bytes(row.trace)
            row = replace(row, said=name)
        described = {**self._described, **row.to_json()}
        self.rows.append(described)
        self._write(described)

    def finish(self) -> None:
        """All rows of the run are there."""
        self._write({**self._described, "setting": {}, "arm": "", "quantity": COMPLETE, "said": True})

    def _write(self, described: dict[str, Any]) -> None:
        with self.path.open("a") as results:
            results.write(json.dumps(described) + "\n")


_TELLERS: Mapping[str, Callable[[float], str]] = {
    "s": units.seconds,
    "bytes": units.size,
    "bytes/s": units.gigabytes_a_second,
    "parameters/s": units.params_a_second,
    "share": units.percent,
    "times": "{:.3g}x".format,
}


def told(row: Mapping[str, Any]) -> tuple[str, str]:
    """The median and the spread, for people."""
    if "waived" in row:
        return "WAIVED", row["waived"]
    if "said" in row:
        value = row["said"]
        return ("yes" if value else "no") if isinstance(value, bool) else value, ""
    median, low, high = (_number(row[name], row["unit"]) for name in ("median", "p20", "p80"))
    return median, f"{low} to {high}" if row["samples"] > 1 else ""


def _number(value: float, unit: str) -> str:
    return _TELLERS[unit](value) if unit in _TELLERS else f"{value:.4g} {unit}".strip()


def machine_of(row: Mapping[str, Any]) -> str:
    """For the name of a file: rows are compared with those of the same machine."""
    return file_name_of(f"{row['gpu'] or row['cpu']} {row['cores']}")


def file_name_of(text: str) -> str:
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")


def said(key: str, value: object) -> str:
    """A setting, for people."""
    words = key.replace("_", " ")
    if isinstance(value, bool):
        return words if value else f"not {words}"
    return f"{words} {value:,}" if isinstance(value, int) else f"{words} {value}"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """With a + where the tree is not as committed; results themselves do not count."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
