"""Rows of results: one JSON object a line, with when, where and of what commit it was measured."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from deep_opt_states import machine

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
PACKAGES = ("torch", "deepspeed", "triton", "numpy")


@dataclass(frozen=True, kw_only=True)
class Row:
    """``samples`` of a ``quantity`` in ``unit``, of an ``arm`` under a ``setting``.

    ``said`` instead of samples: what is no number, and ``waived`` why there is nothing. What is ``claimed`` must hold.
    """

    arm: str
    quantity: str
    unit: str = ""
    samples: Sequence[float] = ()
    said: str | bool | None = None
    waived: str | None = None
    claimed: bool = False
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


class Results:
    """Of one run of a benchmark, appended to ``<benchmark>.jsonl`` in ``folder`` as they come."""

    def __init__(self, benchmark: str, folder: Path, *, quick: bool) -> None:
        gpu = machine.gpu()
        self.path = folder / f"{benchmark}.jsonl"
        self.rows: list[dict[str, Any]] = []
        self._described = {
            "benchmark": benchmark,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": _commit(),
            "quick": quick,
            "cpu": machine.cpu_name(),
            "cores": machine.cores().usable,
            "gpu": None if gpu is None else gpu.name,
            "versions": {"python": platform.python_version()} | _versions(),
        }

    def add(self, row: Row) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        described = {**self._described, **row.to_json()}
        self.rows.append(described)
        with self.path.open("a") as results:
            results.write(json.dumps(described) + "\n")


def told(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """The median, the spread and the unit, for people."""
    if "waived" in row:
        return "WAIVED", "", row["waived"]
    if "said" in row:
        value = row["said"]
        return ("yes" if value else "no") if isinstance(value, bool) else value, "", ""
    scale, unit = _unit(row["unit"], row["median"])
    spread = f"{row['p20'] / scale:.4g} to {row['p80'] / scale:.4g}" if row["samples"] > 1 else ""
    return f"{row['median'] / scale:.4g}", spread, unit


def said(key: str, value: object) -> str:
    """A setting, for people."""
    words = key.replace("_", " ")
    if isinstance(value, bool):
        return words if value else f"not {words}"
    return f"{words} {value:,}" if isinstance(value, int) else f"{words} {value}"


def _unit(unit: str, value: float) -> tuple[float, str]:
    """What to divide by, and the unit then."""
    if unit == "s":
        return (1, "s") if abs(value) >= 1 else (1e-3, "ms")
    if unit in ("bytes", "bytes/s", "parameters/s"):
        for prefix, scale in (("G", 1e9), ("M", 1e6)):
            if abs(value) >= scale:
                return scale, {"bytes": f"{prefix}B", "bytes/s": f"{prefix}B/s"}.get(unit, f"{prefix} parameters/s")
    return 1, unit


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
