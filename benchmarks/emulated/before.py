"""Compare the EMULATED seconds of this tree with those of an earlier commit, in turns.

``python -m benchmarks.emulated.before COMMIT`` checks the commit out in a temporary folder, with the benchmark of this
tree. Each run is trained by processes of the two trees in turns, so that both meet the same load of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import emulated
from benchmarks.emulated.turns import Turns
from benchmarks.harness.rows import REPOSITORY, spread
from examples.common.one_rank import be_the_only_rank_unless_launched

ARMS = ("stock", "all streamed, overlap", "stride 2, overlap", "planned, overlap")
TURNS = Turns(turns=1, iterations=3)

BEFORE, AFTER = "before", "now"
ORDER = (BEFORE, AFTER, AFTER, BEFORE)

QUANTITIES = (
    emulated.HOST_STEP,
    emulated.HOST_STEP_WITHOUT_ADAM,
    emulated.IDLE_OTHERWISE,
    emulated.EXPOSED,
    f"{emulated.EXPOSED}, prediction error",
    emulated.EXPOSED_AFTERWARDS_ERROR,
    emulated.ITERATION,
    "longest lag of this machine in an EMULATED iteration",
)

SHOWN = ("plan (EMULATED)", "load of this machine during the EMULATED run")

console = Console(width=160)


@contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """Check ``commit`` out with the benchmark of this tree, and yield the folder. Its predictions are its own."""
    with TemporaryDirectory() as parent:
        folder = Path(parent) / "tree"
        git = ["git", "-C", str(REPOSITORY), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
        try:
            emulated_here, emulated_there = (tree / "benchmarks" / "emulated" for tree in (REPOSITORY, folder))
            keep = shutil.ignore_patterns("prediction.py")
            shutil.copytree(emulated_here, emulated_there, ignore=keep, dirs_exist_ok=True)
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def train(position: int) -> None:
    """Train the arms of one run of this tree, and print each row with its samples as a line of JSON."""
    be_the_only_rank_unless_launched()
    emulated.start_device()
    for row in emulated.measure_run(emulated.RUNS[position], TURNS, only=ARMS):
        print(json.dumps([row.variant, row.quantity, row.value, list(row.samples)]), flush=True)


def rows_of(tree: Path, position: int) -> list[Any]:
    """Return variant, quantity, value and samples of each row of a run that a process trains in ``tree``."""
    command = [sys.executable, "-m", "benchmarks.emulated.before", "--train", str(position)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    run = subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith('["')]


def compare(commit: str, positions: Sequence[int]) -> None:
    """Train the runs at these positions of ``RUNS`` in both trees, and print a table of each."""
    with tree_of(commit) as before:
        trees = {BEFORE: before, AFTER: REPOSITORY}
        for position in positions:
            samples: dict[tuple[str, str], dict[str, list[float]]] = {}
            for tree in ORDER:
                for variant, quantity, value, measured in rows_of(trees[tree], position):
                    if quantity in QUANTITIES:
                        samples.setdefault((variant, quantity), {}).setdefault(tree, []).extend(measured)
                    elif value is False or quantity in SHOWN:
                        console.print(f"{tree}, {variant}: {quantity}: {value or measured}", highlight=False)
            run = emulated.RUNS[position]
            table = Table(
                "variant", "quantity", commit, "now", "now / before", title=f"{run.labels['machine']}, {run.model}"
            )
            for names, by_tree in samples.items():
                spreads = [spread(by_tree[tree]) for tree in (BEFORE, AFTER)]
                earlier, now = (found["median"] for found in spreads)
                # An error of a prediction may be 0.
                ratio = "" if "error" in names[1] else f"{now / earlier:.3f}"
                table.add_row(*names, *map(_text, spreads), ratio)
            console.print(table)


def _text(found: Mapping[str, float]) -> str:
    return f"{found['median']:.4f} ({found['p20']:.4f} to {found['p80']:.4f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", nargs="?", help="the commit to compare with")
    parser.add_argument("--runs", type=int, nargs="+", default=range(len(emulated.RUNS)), help="positions in RUNS")
    parser.add_argument("--train", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train)
    elif options.commit is None:
        parser.error("name a commit")
    else:
        compare(options.commit, options.runs)


if __name__ == "__main__":
    main()
