"""Runs a benchmark, or all that this machine can run; renders RESULTS.md from what was measured."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.picture import draw
from benchmarks.harness.report import last_runs, render
from benchmarks.harness.rows import QUICK_RESULTS, RESULTS, Results, Row, told
from benchmarks.harness.suite import BENCHMARKS, Waived
from deep_opt_states.host import machine
from examples.one_rank import be_the_only_rank_unless_launched

console = Console()


def run(name: str, folder: Path, *, quick: bool) -> int:
    """1 if an arm that claims stock's bits has others."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if machine.has_cuda() else "cpu")
    # cuBLAS repeats its bits with it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    be_the_only_rank_unless_launched()
    module = _module(name)
    console.print(f"[bold]{name}[/bold]: {BENCHMARKS[name]}")
    results = Results(name, folder, quick=quick)
    start_s = time.perf_counter()
    try:
        for row in module.measure(quick=quick):
            results.add(row)
    except Waived as reason:
        console.print(f"WAIVED: {reason}")
        results.add(Row(arm="all", quantity=name, waived=str(reason)))
        results.finish()
        return 0
    results.finish()
    table = Table("arm", "", "median", "20 % to 80 %")
    for found in results.rows:
        table.add_row(found["arm"], found["quantity"], *told(found))
    console.print(table)
    if not quick:
        console.print(draw(results.rows, folder, module.PICTURE) or "Nothing to draw.")
    console.print(f"{results.path}, {time.perf_counter() - start_s:.0f} s")
    return int(any(found.get("failed") for found in results.rows))


def run_all(folder: Path, *, quick: bool) -> int:
    """Each in a process of its own; one that fails does not keep the others from running."""
    failed = []
    for name in BENCHMARKS:
        command = [sys.executable, "-m", "benchmarks", name, "--output", str(folder), *(["--quick"] if quick else [])]
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(name)
    for name in failed:
        console.print(f"FAILED: {name}")
    return int(bool(failed))


def report(folder: Path) -> None:
    """RESULTS.md beside ``folder``, and the pictures anew."""
    last = last_runs(folder)
    for name, runs in last.items():
        for rows in runs:
            draw(rows, folder, _module(name).PICTURE)
    path = folder.parent / "RESULTS.md"
    path.write_text(render(last))
    console.print(str(path))


def _module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


def main(arguments: Sequence[str] | None = None) -> int:
    names = "\n".join(f"  {name:<16}{question}" for name, question in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"{__doc__}\n\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=["all", "report", *BENCHMARKS], metavar="all, report, or the name of one")
    parser.add_argument("--quick", action="store_true", help="tiny, in seconds: shows that it runs, measures nothing")
    default = "default: benchmarks/results, of quick runs .cache/benchmarks"
    parser.add_argument("--output", type=Path, help=f"folder of the rows ({default})")
    options = parser.parse_args(arguments)
    folder = options.output or (QUICK_RESULTS if options.quick else RESULTS)
    if options.what == "report":
        report(folder)
        return 0
    if options.what == "all":
        return run_all(folder, quick=options.quick)
    return run(options.what, folder, quick=options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
