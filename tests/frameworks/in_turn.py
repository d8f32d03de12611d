"""Runs one of the examples four times in this process, as its command line would, and says what updated it.

With stock, with the plugin, and with the plugin interrupted after half of the steps: what differs is an environment
variable. One process, since most of the seconds of a run go into imports.

    in_turn.py EXAMPLE FOLDER [ARGUMENT...]   the launcher of the framework starts it instead of the example
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

SAVE_EVERY = 2
STEPS = 2 * SAVE_EVERY


@dataclass
class Seen:
    run: str
    optimizer: str = ""
    steps: int = 0
    deferred: int = 0
    """How many updates went on when ``engine.step()`` had returned."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("example")
    parser.add_argument("folder", type=Path)
    args, arguments = parser.parse_known_args()
    # As for a script that is run: what lies beside it comes first.
    sys.path.insert(0, str(Path(args.example).parent))
    # Accelerate ends it after each run.
    PartialState.destroy_process_group = lambda *_: None
    for run, steps in (("stock", STEPS), ("plugin", STEPS), ("resumed", SAVE_EVERY), ("resumed", STEPS)):
        os.environ["DEEP_OPT_STATES"] = "0" if run == "stock" else "1"
        output = ["--output", str(args.folder / run), "--steps", str(steps), "--save_every", str(SAVE_EVERY)]
        sys.argv = [args.example, *arguments, *output]
        seen.append(Seen(run))
        # Accelerate keeps the config that it has read.
        AcceleratorState._reset_state(reset_partial_state=True)
        runpy.run_path(args.example, run_name="__main__")
    answer([asdict(run) for run in seen])
    end_process()


seen: list[Seen] = []


@wrapt.patch_function_wrapper(deepspeed.runtime.engine, "DeepSpeedEngine.step")
def watched_step(step: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    returned = step(*args, **kwargs)
    run, optimizer = seen[-1], engine.optimizer
    run.optimizer = type(optimizer).__name__
    run.steps += 1
    run.deferred += run.optimizer == "DeepOptimizerStates_Stage3" and optimizer._update._executor.pending
    return returned


if __name__ == "__main__":
    main()
