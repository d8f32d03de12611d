"""Run one of the examples four times in this process, as its command line would, and report its optimizer.

The example runs with stock, with the plugin, and with the plugin in two parts, the second of which resumes. Only an
environment variable differs between stock and plugin. All runs share one process, since imports take most of the time.

    in_turn.py EXAMPLE FOLDER [ARGUMENT...]   the launcher of the framework starts this instead of the example
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import deepspeed
import wrapt
from accelerate.state import AcceleratorState, PartialState

from tests.launch import answer
from tests.zero.process_group import end_process

STEPS = 2
runs: list[dict[str, Any]] = []
"""The name of each run, its optimizer, its steps, and those whose update was still running when they returned."""


@wrapt.patch_function_wrapper(deepspeed.runtime.engine, "DeepSpeedEngine.step")
def watched_step(step: Any, engine: Any, args: Any, kwargs: Any) -> Any:
    """Call ``engine.step()``, and record the optimizer and whether its update is still running."""
    returned = step(*args, **kwargs)
    run, optimizer = runs[-1], engine.optimizer
    run["optimizer"] = type(optimizer).__name__
    run["steps"] += 1
    run["deferred"] += hasattr(optimizer, "_update") and optimizer._update._executor.pending
    return returned


if __name__ == "__main__":
    _, example, folder, *arguments = sys.argv
    # As for a script that Python runs, modules in its folder are found first.
    sys.path.insert(0, str(Path(example).parent))
    # Accelerate destroys the process group after each run.
    PartialState.destroy_process_group = lambda *_: None
    for name, steps in (("stock", STEPS), ("plugin", STEPS), ("resumed", 1), ("resumed", STEPS)):
        os.environ["DEEP_OPT_STATES"] = "0" if name == "stock" else "1"
        output = ["--output", str(Path(folder, name)), "--steps", str(steps), "--save_every", "1"]
        sys.argv = [example, *arguments, *output]
        runs.append({"run": name, "optimizer": "", "steps": 0, "deferred": 0})
        # Accelerate caches the config.
        AcceleratorState._reset_state(reset_partial_state=True)
        runpy.run_path(example, run_name="__main__")
    answer(runs)
    end_process()
