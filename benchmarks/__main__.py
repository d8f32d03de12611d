"""Run one benchmark, or all of them, or write RESULTS.md from the rows that were measured."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.rows import BENCHMARKS, QUICK_RESULTS, RESULTS, Results, Row, Waived, format_row
from benchmarks.report import report
from deep_opt_states.host import machine
from examples.common.one_rank import be_the_only_rank_unless_launched

console = Console()


def run(name: str, folder: Path, amounts: Mapping[str, float] | None = None, *, quick: bool) -> int:
    """Run the benchmark ``name`` and append its rows to ``folder``.

    ``amounts`` are parameters of its ``measure``. Return the exit code: 1 if a claim does not hold, such as a variant
    that claims to be bit-identical and is not.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if machine.has_cuda() else "cpu")
    # cuBLAS gives the same bits in every run only with this setting.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    be_the_only_rank_unless_launched()
    module = _module(name)
    console.print(f"[bold]{name}[/bold]: {BENCHMARKS[name]}")
    results = Results(name, folder, quick=quick)
    start_s = time.perf_counter()
    try:
        for row in module.measure(quick=quick, **(amounts or {})):
            results.add(row)
    except Waived as reason:
        console.print(f"WAIVED: {reason}")
        results.add(Row(variant="all", quantity=name, waived=str(reason)))
        return 0
    table = Table("variant", "quantity", "median", "20 % to 80 %")
    for row_of_run in results.rows:
        table.add_row(row_of_run["variant"], row_of_run["quantity"], *format_row(row_of_run))
    console.print(table)
    console.print(f"{results.path}, {time.perf_counter() - start_s:.0f} s")
    return int(any(row_of_run.get("failed") for row_of_run in results.rows))


def run_all(folder: Path, *, quick: bool) -> int:
    """Run each benchmark in a process of its own. Return 1 if any failed; the others still run."""
    failed = []
    for name in BENCHMARKS:
        command = [sys.executable, "-m", "benchmarks", name, "--output", str(folder), *(["--quick"] if quick else [])]
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(name)
    for name in failed:
        console.print(f"FAILED: {name}")
    return int(bool(failed))


def _module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


def _amounts(name: str, assignments: Sequence[str]) -> dict[str, float]:
    """Return the parameters of the benchmark that ``assignments`` set. Raise ``ValueError`` for any other one."""
    known = (
        [key for key in inspect.signature(_module(name).measure).parameters if key != "quick"] if assignments else []
    )
    amounts: dict[str, float] = {}
    for assignment in assignments:
        key, _, value = assignment.partition("=")
        if key not in known or not value.replace(".", "", 1).isdigit():
            raise ValueError(
                f"--set must be one of {', '.join(known) or 'none'} for {name}, with a number; found {assignment!r}. "
                "Write for example --set minutes=10."
            )
        amounts[key] = float(value) if "." in value else int(value)
    return amounts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    names = "\n".join(f"  {name:<16}{question}" for name, question in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"{__doc__}\n\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=["all", "report", *BENCHMARKS], metavar="all | report | BENCHMARK")
    parser.add_argument("--quick", action="store_true", help="run tiny models for seconds: a smoke test only")
    default = "default: benchmarks/results; for quick runs .cache/benchmarks"
    parser.add_argument("--output", type=Path, help=f"folder for the rows ({default})")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=NUMBER", help="set a parameter of the benchmark"
    )
    options = parser.parse_args(arguments)
    folder = options.output or (QUICK_RESULTS if options.quick else RESULTS)
    if options.set and options.command in ("all", "report"):
        parser.error(f"--set must be absent with {options.command}, found {options.set[0]!r}. Run one benchmark.")
    if options.command == "report":
        path = folder.parent / "RESULTS.md"
        path.write_text(report(folder))
        console.print(str(path))
        return 0
    if options.command == "all":
        return run_all(folder, quick=options.quick)
    try:
        amounts = _amounts(options.command, options.set)
    except ValueError as error:
        parser.error(str(error))
    return run(options.command, folder, amounts, quick=options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
