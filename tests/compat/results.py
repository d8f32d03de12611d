"""Keep the results of tried releases in ``results.json``, from which ``tools/generate_docs.py`` writes tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from packaging.version import Version

from benchmarks.harness.rows import commit
from deep_opt_states.names import __version__

RESULTS = Path(__file__).with_name("results.json")


def read_results() -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return results


def add_result(package: str, version: str, found: dict[str, Any]) -> bool:
    results = read_results()
    of_package = results.setdefault(package, {})
    tried_at = {"deep_opt_states": __version__, "commit": commit()}
    before = {key: value for key, value in of_package.get(version, {}).items() if key not in tried_at}
    changed = before != found
    of_package[version] = {**found, **tried_at}
    order = str.lower if package == "frameworks" else Version
    results[package] = {key: of_package[key] for key in sorted(of_package, key=order)}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return changed


def write_compiler(folder: Path) -> Path:
    """Write a compiler into ``folder`` that needs half the time for DeepSpeed's ops, with the same instructions."""
    compiler = folder / "c++"
    compiler.write_text('#!/bin/sh\nexec c++ "$@" -g0\n')
    compiler.chmod(0o755)
    return compiler
