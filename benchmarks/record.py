"""Rows of results: one JSON object a line, with when, where and of what commit it was measured."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from deep_opt_states import machine

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"


def record(benchmark: str, packages: tuple[str, ...], row: Mapping[str, object]) -> Path:
    """Appends to ``results/<benchmark>.jsonl``; ``packages`` are those whose versions matter."""
    path = RESULTS / f"{benchmark}.jsonl"
    path.parent.mkdir(exist_ok=True)
    described = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": machine.cpu_name(),
        "cores": machine.cores().usable,
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in packages},
    }
    with path.open("a") as results:
        results.write(json.dumps({**described, **row}) + "\n")
    return path


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
