"""Make an engine of every given JSON config, one after the other, and write a report on each.

The script does not mention the plugin: it searches for everything that differs from stock DeepSpeed.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from tests.zero.process_group import end_process


def optimizer_or_error(config: str) -> dict[str, Any]:
    model = torch.nn.Linear(8, 8)
    try:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    except ValueError as error:
        return {"error": type(error).__name__, "message": str(error)}
    optimizer_class = type(engine.optimizer)
    return {"optimizer": f"{optimizer_class.__module__}.{optimizer_class.__qualname__}", "modules": sorted(sys.modules)}


def describe(value: Any) -> str:
    """Return a description that distinguishes a method of stock DeepSpeed from a replaced or wrapped one."""
    return f"{type(value).__name__} {getattr(getattr(value, '__code__', None), 'co_filename', '')}"


def wrapped_names() -> list[str]:
    """Return the attributes of DeepSpeed modules, and of their classes, that are wrapt wrappers around functions."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "deepspeed"]
    return sorted({name for module in modules for name in wrapped_in(module)})


def wrapped_in(module: ModuleType) -> Iterator[str]:
    for owner in (module, *(value for value in vars(module).values() if inspect.isclass(value))):
        for name, value in vars(owner).items():
            if type(value).__name__ == "FunctionWrapper":
                original = value.__wrapped__
                assert inspect.isfunction(original)
                assert original.__name__ == name
                yield f"{original.__module__}.{original.__qualname__}"


def main(report: str, *configs: str) -> None:
    found = {
        "engines": [optimizer_or_error(config) for config in configs],
        "engine attributes": {name: describe(value) for name, value in vars(DeepSpeedEngine).items()},
        "wrapped": wrapped_names(),
    }
    Path(f"{report}.{os.environ['RANK']}").write_text(json.dumps(found))
    # A process that exits while Gloo's threads are alive is sometimes aborted, with or without DeepSpeed.
    torch.distributed.destroy_process_group()
    end_process()


if __name__ == "__main__":
    main(*sys.argv[1:])
