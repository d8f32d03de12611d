"""Store results as rows: one JSON object per line, with the median, the spread and the number of samples.

A line with ``run`` describes the machine, the versions and the commit of the lines after it, and a line with
``setting`` their model and batches. ``BENCHMARKS`` lists every benchmark: a module of ``benchmarks`` whose
``measure(quick=...)`` yields ``Row`` objects or raises ``Waived``.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.cores import usable_cores
from deep_opt_states.host import machine
from perf_model import units

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results"
RESULT_FILES = ("benchmarks/results", "tests/compat/results.json", "docs/compatibility.md")
"""The results in the tree, and the page with their tables: a run that writes them leaves the code as it is."""

QUICK_RESULTS = REPOSITORY / ".cache" / "benchmarks"
"""The folder of quick runs, which measure nothing."""

BENCHMARKS = {
    "training_step": "How long does an iteration take, by phase, micro-batch, accumulation and model size?",
    "update_phase": "How long does the update take, compared with stock and DeepSpeed's other ways to offload?",
    "ablation": "How much speedup does each part of the plugin add?",
    "adam": "How fast is one Adam update, on the CPU and on the GPU?",
    "copy": "How fast are copies between host and accelerator, by direction and size?",
    "hooks": "How much host time do the hooks take while no update is in flight?",
    "gpu": "How does the plugin compare with other ways to train 1.7 or 4 billion parameters on one GPU?",
    "gpu_bits": "Are losses and states bit-identical to stock's, with one rank and with two on one GPU?",
    "emulated": "How long do stock and ours take on EMULATED machines and disks, and are the predictions near?",
    "published": "How near are predictions to the published runs of the original artifact?",
}

EMULATED = "EMULATED"
"""The word in the quantity of every row whose seconds are an emulated machine's."""

UPDATE_SPEEDUP, ITERATION_SPEEDUP = "update speedup over stock", "iteration speedup over stock"
COST, COST_SHARE, RETAINED = "cost of the update", "cost / stock's cost", "retained"
BF16_SPEEDUP, MEMORY_SHARE = "update speedup over fp32 states", "share of the in-place bandwidth"
ERROR = "prediction error"
BIT_IDENTICAL = "bit-identical to stock"
"""The quantity of the rows that compare losses and weights with stock's."""

PACKAGES = ("torch", "deepspeed", "triton", "numpy", "transformers", "torchao")
"""The packages whose versions each run records."""


class Waived(Exception):
    """Raised by ``measure`` with the reason why this machine cannot answer the benchmark's question."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One result: the ``samples`` of a ``quantity`` in ``unit``, measured for a ``variant`` in a ``setting``.

    A result that is no number has a ``value`` instead of samples, and a result that this machine cannot measure has
    the reason in ``waived``. If a ``claimed`` value is False, the run of the benchmark fails.
    """

    variant: str
    quantity: str
    unit: str = ""
    samples: Sequence[float] = ()
    value: str | bool | None = None
    waived: str | None = None
    claimed: bool = False
    setting: Mapping[str, object] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """Return the row without its setting. ``failed`` marks a claim that does not hold."""
        row: dict[str, object] = {"variant": self.variant, "quantity": self.quantity}
        if self.waived is not None:
            return {**row, "waived": self.waived}
        if self.value is not None:
            return {**row, "value": self.value, **({"failed": True} if self.claimed and self.value is False else {})}
        return {**row, "unit": self.unit, **spread(self.samples), "samples": len(self.samples)}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and, of more than one value, the 20th and 80th percentile by nearest rank."""
    ordered = sorted(values)
    last = len(ordered) - 1
    if last == 0:
        return {"median": ordered[0]}
    return {"median": median(ordered), "p20": ordered[round(0.2 * last)], "p80": ordered[round(0.8 * last)]}


class Results:
    """The rows of one run of a benchmark, appended to ``<benchmark>.jsonl`` in ``folder`` as soon as they exist."""

    def __init__(self, benchmark: str, folder: Path, *, quick: bool) -> None:
        # Nothing is measured on the GPU if the model trains on the CPU.
        gpu = None if os.environ.get("DS_ACCELERATOR") == "cpu" else machine.gpu()
        self.path = folder / f"{benchmark}.jsonl"
        self.rows: list[dict[str, Any]] = []
        self._run = {
            "benchmark": benchmark,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": commit(),
            "quick": quick,
            "cpu": machine.cpu_name(),
            "cores": usable_cores(),
            "host_memory_bytes": machine.memory().usable_bytes,
            "gpu": None if gpu is None else gpu.name,
            "gpu_memory_bytes": None if gpu is None else gpu.total_memory,
            "versions": {"python": platform.python_version()} | _versions(),
        }
        self._setting: Mapping[str, object] | None = None

    def add(self, row: Row) -> None:
        """Append ``row`` to the file and to ``rows``."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as results:
            if not self.rows:
                results.write(line({"run": self._run}))
            if row.setting != self._setting:
                self._setting = row.setting
                results.write(line({"setting": dict(row.setting)}))
            results.write(line(row.as_dict()))
        self.rows.append({**self._run, "setting": dict(row.setting), **row.as_dict()})


def line(entry: Mapping[str, object]) -> str:
    """Return a line of a file of rows: numbers of rows have five digits, which is more than any of them repeats."""
    rounded = {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in entry.items()}
    return json.dumps(rounded, separators=(",", ":")) + "\n"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, each with the description of its run and its setting."""
    run: dict[str, Any] = {}
    setting: dict[str, Any] = {}
    rows = []
    for text in path.read_text().splitlines():
        entry = json.loads(text)
        if "run" in entry:
            run, setting = entry["run"], {}
        elif "setting" in entry:
            setting = entry["setting"]
        else:
            rows.append({**run, "setting": setting, **entry})
    return rows


def last_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the last run of each benchmark in each setting on each kind of machine, without quick runs.

    Machines without a GPU are of one kind if they have as many cores. An EMULATED machine is in the setting.
    """
    runs: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for name in BENCHMARKS:
        path = folder / f"{name}.jsonl"
        for row in read_rows(path) if path.exists() else []:
            if not row["quick"]:
                setting = row["setting"]
                kind = None if "machine" in setting else row["gpu"] or row["cores"]
                key = name, kind, json.dumps(setting)
                if key not in runs or runs[key][0]["date"] != row["date"]:
                    runs[key] = []
                runs[key].append(row)
    # A run may measure the same quantity twice: the later one counts.
    return [row for rows in runs.values() for row in {(row["variant"], row["quantity"]): row for row in rows}.values()]


_FORMATS: Mapping[str, Callable[[float], str]] = {
    "s": units.seconds,
    "bytes": units.size,
    "bytes/s": units.gigabytes_per_second,
    "parameters/s": units.params_per_second,
    # Whole percent would show a result that misses its bound by little as the bound itself.
    "share": lambda share: f"{100 * share:.3g}%",
    "times": "{:.3g}x".format,
}


def format_row(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the median or the value as text, and the spread or the reason for a waiver, which may be empty."""
    if "waived" in row:
        return "WAIVED", row["waived"]
    if "value" in row:
        value = row["value"]
        return ("yes" if value else "no") if isinstance(value, bool) else value, ""
    median, *ends = (_format_number(row[name], row["unit"]) for name in ("median", "p20", "p80") if name in row)
    return median, " to ".join(ends)


def _format_number(value: float, unit: str) -> str:
    return _FORMATS[unit](value) if unit in _FORMATS else f"{value:.4g} {unit}".strip()


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Return the short commit, with a ``+`` if the tree has changes other than results."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ".", *(f":!{path}" for path in RESULT_FILES))
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
