"""Kill runs with SIGKILL at random moments, and compare the runs that resume from their last checkpoint with stock.

The command is ``python -m tests.kills --kills 20``. The moments of the kills are in forward, backward, an update and a
save, in rotation. The seed determines them, up to the timing of the machine.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile

from tests.launch import run_ranks

SECONDS_PER_KILL = 120


def main(arguments: list[str] | None = None) -> int:
    """Kill and resume the runs. Return the exit code: 1 after a failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None, help="default: random")
    options = parser.parse_args(arguments)
    seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}: {options.kills} kills ...", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        script = ["-m", "tests.zero.checkpoints.killed_ranks", folder, str(seed), str(options.kills)]
        (finished,) = run_ranks(1, script, timeout_s=SECONDS_PER_KILL * (options.kills + 1))
    found = finished.answers()
    for kill in found:
        print(f"aimed at {kill['aimed at']}, killed in {kill['killed in']}, latest {kill['latest']}: ", end="")
        print(kill["problem"] or "the same bits as stock")
    if finished.returncode != 0 or len(found) < options.kills or any(kill["problem"] for kill in found):
        print(finished.output[-5000:] if finished.returncode else "")
        print(f"FAILED. Repeat with: python -m tests.kills --kills {options.kills} --seed {seed}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
