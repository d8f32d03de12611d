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

RESULTS = Path(__file__).parent / "results"


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
    repository = RESULTS.parents[1]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=repository, capture_output=True, text=True)
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--", ".", f":!{RESULTS.relative_to(repository)}"],
        cwd=repository,
        capture_output=True,
        text=True,
    )
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "") if commit.returncode == 0 else "unknown"
