"""Run one of the examples four times in this process, as its command line would, and report its optimizer.

The example runs with stock, with the plugin, and with the plugin in two parts, the second of which resumes. Only an
environment variable differs between stock and plugin. All runs share one process, since imports take most of the time.

    in_turn.py EXAMPLE FOLDER [ARGUMENT...]   the launcher of the framework starts this instead of the example
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed
import wrapt
from accelerate.state import AcceleratorState, PartialState

from tests.launch import answer
from tests.zero.process_group import end_process

SAVE_EVERY = 1
STEPS = 2 * SAVE_EVERY


@dataclass
class ObservedRun:
    """The optimizer and the steps of one run of the example."""

    run: str
    optimizer: str = ""
    steps: int = 0
    deferred: int = 0
    """The number of updates that were still running when ``engine.step()`` returned."""


def main() -> None:
    """Run the example four times, and answer with the observed runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("example")
    parser.add_argument("folder", type=Path)
    args, arguments = parser.parse_known_args()
    # As for a script that Python runs, modules in its folder are found first.
    sys.path.insert(0, str(Path(args.example).parent))
    # Accelerate destroys the process group after each run.
    PartialState.destroy_process_group = lambda *_: None
    for run, steps in (("stock", STEPS), ("plugin", STEPS), ("resumed", SAVE_EVERY), ("resumed", STEPS)):
        os.environ["DEEP_OPT_STATES"] = "0" if run == "stock" else "1"
        output = ["--output", str(args.folder / run), "--steps", str(steps), "--save_every", str(SAVE_EVERY)]
        sys.argv = [args.example, *arguments, *output]
        runs.append(ObservedRun(run))
        # Accelerate caches the config.
        AcceleratorState._reset_state(reset_partial_state=True)
        runpy.run_path(args.example, run_name="__main__")
    answer([asdict(run) for run in runs])
    end_process()


runs: list[ObservedRun] = []


@wrapt.patch_function_wrapper(deepspeed.runtime.engine, "DeepSpeedEngine.step")
def watched_step(step: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    """Call ``engine.step()``, and record the optimizer and whether its update is still running."""
    returned = step(*args, **kwargs)
    run, optimizer = runs[-1], engine.optimizer
    run.optimizer = type(optimizer).__name__
    run.steps += 1
    run.deferred += run.optimizer == "DeepOptimizerStates_Stage3" and optimizer._update._executor.pending
    return returned


if __name__ == "__main__":
    main()
