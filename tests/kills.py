"""Kill runs with SIGKILL at random moments, and compare the runs that resume from their last checkpoint with stock.

The command is ``python -m tests.kills --kills 20``. The moments of the kills are in a save, a load, a move of units
between placements, an update, backward and forward, in rotation. The seed determines them, up to the timing of the
machine. With ``--training decoupled``, processes beside the ranks write the checkpoints.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from typing import Any

from tests.launch import run_ranks

TRAININGS = ("data parallel", "decoupled", "AutoTP")
SECONDS_PER_KILL = 120


def kill_runs(kills: int, seed: int, training: str) -> tuple[list[dict[str, Any]], str]:
    """Kill and resume ``kills`` runs. Return the answer of each, and the output if the program has failed."""
    with tempfile.TemporaryDirectory() as folder:
        script = ["-m", "tests.zero.checkpoints.killed_ranks", folder, str(seed), str(kills), training]
        (finished,) = run_ranks(1, script, timeout_s=SECONDS_PER_KILL * (kills + 1))
    found = finished.answers()
    failed = finished.returncode != 0 or len(found) < kills
    return found, finished.output if failed else ""


def main(arguments: list[str] | None = None) -> int:
    """Kill and resume the runs. Return the exit code: 1 after a failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None, help="default: random")
    parser.add_argument("--training", choices=TRAININGS, default=TRAININGS[0])
    options = parser.parse_args(arguments)
    seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}: {options.kills} kills ...", flush=True)
    found, output = kill_runs(options.kills, seed, options.training)
    for kill in found:
        print(
            f"aimed at {kill['aimed at']}, killed in {kill['killed in']}, latest {kill['latest']!r}, resumed from "
            f"{kill['resumed from']}, {kill['hung in init_distributed']} hangs in init_distributed: "
            f"{kill['problem'] or 'the same bits as stock'}"
        )
    print(summary(found))
    if output or any(kill["problem"] for kill in found):
        print(output[-5000:])
        repeat = f"python -m tests.kills --kills {options.kills} --seed {seed} --training '{options.training}'"
        print(f"FAILED. Repeat with: {repeat}")
        return 1
    return 0


def summary(found: list[dict[str, Any]]) -> str:
    """Return one line with the number of kills in each phase, of failures, and of hangs at start."""
    phases = ", ".join(f"{count} in {phase}" for phase, count in Counter(kill["phase"] for kill in found).items())
    failures = sum(bool(kill["problem"]) for kill in found)
    empty = sum(not kill["latest"] for kill in found)
    incomplete = sum(kill["latest"] != kill["resumed from"] for kill in found) - empty
    hangs = sum(kill["hung in init_distributed"] for kill in found)
    return (
        f"{len(found)} kills ({phases}): {failures} failures, {incomplete} with a latest that lacks files of a rank, "
        f"{empty} with an empty latest, {hangs} restarts that hung in init_distributed"
    )


if __name__ == "__main__":
    sys.exit(main())
