"""Store results as rows: one JSON object per line, with the machine, the date and the commit of the measurement.

``BENCHMARKS`` lists every benchmark. Each is a module of ``benchmarks`` with two names: ``measure(quick=...)`` yields
``Row`` objects or raises ``Waived``, and ``CHART`` selects the quantities to draw. ``docs/benchmarking.md`` shows how
to add one.
"""

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
RESULT_FILES = ("benchmarks/results", "tests/compat/results.json", "docs/compatibility.md")
"""The results in the tree, and the page with their tables: a run that writes them leaves the code as it is."""

QUICK_RESULTS = REPOSITORY / ".cache" / "benchmarks"
"""The folder of quick runs. They measure nothing, and must not replace a trace that was measured."""

BENCHMARKS = {
    "copy": "How fast are copies between host and accelerator, by direction and size?",
    "adam": "How fast is one Adam update, on the CPU and on the GPU?",
    "update_phase": "How long does the update take, compared with stock and DeepSpeed's other ways to offload?",
    "overlap": "How much of the update is exposed, with overlap off, in backward, in forward, and in both?",
    "training_step": "How long does an iteration take, by phase, micro-batch, accumulation and model size?",
    "gpu": "How does the plugin compare with other ways to train 1.7 or 4 billion parameters on one GPU?",
    "gpu_bits": "Are losses and states bit-identical to stock's, with one rank and with two on one GPU?",
    "ablation": "How much speedup does each part of the plugin add?",
    "trace": "Where does the time of a step go?",
    "exactness": "Are losses and weights identical to stock's over hundreds of steps?",
    "model_error": "How accurate are the predictions, by placement?",
    "published": "How near are predictions to the published runs of the original artifact?",
    "planner": "How good are the plans, and how long does planning take?",
    "overhead": "How much does the plugin cost where it cannot gain anything?",
    "hooks": "How much host time do the hooks take while no update is in flight?",
    "beside": "Why is forward slower beside an update, and by how much?",
    "scaling": "How does the gain change with more ranks?",
    "simulated_scaling": "How would the gain change on clusters of up to 512 GPUs? (SIMULATED)",
    "slots": "Would more staging slots hide more of the update, and when is memory free for them? (EMULATED)",
    "emulated": "How long do stock and ours take on EMULATED machines, and what does the model predict?",
    "disk": "How long does an update with states on disk take, compared with stock's swapper? (EMULATED)",
    "reliability": "Do runs survive kills, malformed input and thousands of steps, and does a long search find a race?",
}
"""The question that each benchmark answers."""

EMULATED = "EMULATED"
"""The word in the quantity of every row whose seconds are those of an emulated machine."""

SIMULATED = "SIMULATED"
"""The variant of rows that ``perf_model`` predicts, for machines on which nothing runs."""

PACKAGES = ("torch", "deepspeed", "triton", "numpy", "transformers", "torchao")
"""The packages whose versions each row records."""


class Waived(Exception):
    """Raised by ``measure`` with the reason why this machine cannot answer the benchmark's question."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One result: the ``samples`` of a ``quantity`` in ``unit``, measured for a ``variant`` in a ``setting``.

    A result that is no number has a ``value`` instead of samples, and a result that this machine cannot measure has
    the reason in ``waived``. If a ``claimed`` value is False, the run of the benchmark fails. ``trace`` is a gzipped
    Chrome trace: it is written to a file next to the rows, whose name becomes the value.
    """

    variant: str
    quantity: str
    unit: str = ""
    samples: Sequence[float] = ()
    value: str | bool | None = None
    waived: str | None = None
    claimed: bool = False
    trace: bytes | None = None
    setting: Mapping[str, object] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """Return the row without the description of the machine. ``failed`` marks a claim that does not hold."""
        row: dict[str, object] = {"setting": dict(self.setting), "variant": self.variant, "quantity": self.quantity}
        if self.waived is not None:
            return {**row, "waived": self.waived}
        if self.value is not None:
            return {**row, "value": self.value, **({"failed": True} if self.claimed and self.value is False else {})}
        return {**row, "unit": self.unit, **spread(self.samples), "samples": len(self.samples)}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, and the 20th and 80th percentile by nearest rank."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {"median": median(ordered), "p20": ordered[round(0.2 * last)], "p80": ordered[round(0.8 * last)]}


COMPLETE = "complete"
"""The quantity of the last row of a run that was not stopped."""


class Results:
    """The rows of one run of a benchmark, appended to ``<benchmark>.jsonl`` in ``folder`` as soon as they exist."""

    def __init__(self, benchmark: str, folder: Path, *, quick: bool) -> None:
        # Nothing is measured on the GPU if the model trains on the CPU.
        gpu = None if os.environ.get("DS_ACCELERATOR") == "cpu" else machine.gpu()
        self.path = folder / f"{benchmark}.jsonl"
        self.rows: list[dict[str, Any]] = []
        self._described = {
            "benchmark": benchmark,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": commit(),
            "quick": quick,
            "cpu": machine.cpu_name(),
            "cores": machine.cores().usable,
            "host_memory_bytes": machine.memory().usable_bytes,
            "gpu": None if gpu is None else gpu.name,
            "gpu_memory_bytes": None if gpu is None else gpu.memory_bytes,
            "versions": {"python": platform.python_version()} | _versions(),
        }

    def add(self, row: Row) -> None:
        """Append ``row`` to the file and to ``rows``; write its trace, if it has one, to a file of its own."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if row.trace is not None:
            name = f"{self.path.stem}-{machine_of(self._described)}-{file_name_of(row.variant)}.json.gz"
            self.path.with_name(name).write_bytes(row.trace)
            row = replace(row, value=name)
        described = {**self._described, **row.as_dict()}
        self.rows.append(described)
        self._write(described)

    def finish(self) -> None:
        """Append the row that marks the run as complete."""
        self._write({**self._described, "setting": {}, "variant": "", "quantity": COMPLETE, "value": True})

    def _write(self, described: dict[str, Any]) -> None:
        with self.path.open("a") as results:
            results.write(json.dumps(described) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


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
    median, low, high = (_format_number(row[name], row["unit"]) for name in ("median", "p20", "p80"))
    return median, f"{low} to {high}" if row["samples"] > 1 else ""


def format_with_spread(row: Mapping[str, Any]) -> str:
    """Return the median with its spread in parentheses, or the value."""
    value, spread = format_row(row)
    return f"{value} ({spread})" if spread else value


def _format_number(value: float, unit: str) -> str:
    return _FORMATS[unit](value) if unit in _FORMATS else f"{value:.4g} {unit}".strip()


def machine_of(row: Mapping[str, Any]) -> str:
    """Return the machine's name for file names. Rows are compared only with rows of the same machine."""
    return file_name_of(f"{row['gpu'] or row['cpu']} {row['cores']}")


def file_name_of(text: str) -> str:
    """Return ``text`` in lower case, with hyphens for everything that is no letter or digit."""
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")


def format_setting(key: str, value: object) -> str:
    """Return one entry of a setting as text, such as "micro batch 8"."""
    words = key.replace("_", " ")
    if isinstance(value, bool):
        return words if value else f"not {words}"
    return f"{words} {value:,}" if isinstance(value, int) else f"{words} {value}"


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
