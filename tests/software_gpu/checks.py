"""Run the checks of a module in processes that have loaded the device, and answer with the error of each.

A process can load the device once, and never unload it, so checks do not run in the process of pytest. A check is a
public function of the module. A test shows the answer of one check.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from tests.launch import answer
from tests.software_gpu import device
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import PLAIN
from tests.zero.training_once import ProgramRanks, TrainingOnce


def checks_of(module: ModuleType) -> dict[str, Callable[[], None]]:
    """Return the checks of ``module`` by name, in the order of the file."""
    return {
        name: function
        for name, function in vars(module).items()
        if callable(function) and not name.startswith("_") and function.__module__ == module.__name__
    }


def ranks_of(*modules: ModuleType) -> ProgramRanks:
    """Return the program that runs the checks of ``modules``."""
    return ProgramRanks(__name__, timeout_s=300, arguments=lambda folder: [module.__name__ for module in modules])


def assert_passed(trained: TrainingOnce, name: str, world_size: int = 1) -> None:
    """Fail with the traceback of the check ``name`` on the first rank on which it failed."""
    for rank, by_name in enumerate(trained.answers_by_name(world_size)):
        assert by_name[name]["error"] == "", f"rank {rank}:\n{by_name[name]['error']}"


def main(*modules: str) -> None:
    for name, check in (
        (name, check) for module in modules for name, check in checks_of(import_module(module)).items()
    ):
        error = ""
        try:
            check()
            device.synchronize()
        except Exception:  # noqa: BLE001 (the test shows it)
            error = traceback.format_exc()
        PLAIN.apply()
        device.take_error()
        gc.collect()
        answer({"name": name, "error": error})


if __name__ == "__main__":
    with software_process_group():
        main(*sys.argv[1:])
