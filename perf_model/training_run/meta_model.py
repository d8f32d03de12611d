"""Count the parameters of a model with transformers: a child process builds it without memory for its weights.

This process never imports torch. The child is ``deep_opt_states/meta_model.py``, which executes no code of the model's
author.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from perf_model.json_input import parse_json, printable, shorten
from perf_model.training_run.model import MAX_SIZES, ModelError, ModelShape, ParameterShape, require_integer

PROGRAM = "deep_opt_states.meta_model"
TIME_LIMIT_S = 180
"""Importing torch and transformers takes seconds, or a minute on a busy machine; building a model takes seconds."""

_REMEDY = "Give --params with the number of parameters, in place of --model."


def shape_from_transformers(config: dict[str, Any], family: str, name: str) -> ModelShape:
    """Return the shape of the model with the values ``config``, as transformers builds it.

    Operations are those of a text: encoders for images and sound count as parameters, and no token passes them. Each
    other matrix is multiplied by each token; of experts, the share that a token is routed to. Raise ``ModelError`` if
    transformers cannot build the model, or names neither its layers nor its widths.
    """
    found = _run(config)
    if "error" in found:
        rule = (
            f"model_type: {shorten(family)} has no formula here, so transformers must be able to build the model, "
            f"found {printable(found['error'], most=300)}"
        )
        if "auto_map" in config:
            rule += ". Its auto_map names code of the model's author, which is not executed"
        raise ModelError(f"{rule}.\n{_REMEDY}")
    for key in ("layers", "hidden", "vocab"):
        require_integer(f"{key} of {shorten(family)}, in transformers", found[key], 1, MAX_SIZES[key], _REMEDY)
    return ModelShape(
        name=name,
        layers=found["layers"],
        hidden=found["hidden"],
        heads=found["heads"],
        kv_heads=found["kv_heads"],
        head_dim=found["head_dim"],
        intermediate=found["intermediate"],
        vocab=found["vocab"],
        scores_width=2 * found["layers"] * found["heads"] * found["head_dim"],
        tensors=tuple(ParameterShape(*row) for row in found["parameters"]),
        tied=tuple((alias, first) for alias, first in found["tied"]),
        source=f"counted by {found['source']}",
    )


def _run(config: dict[str, Any]) -> dict[str, Any]:
    """Return the output of the child process, or its failure as an error."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", PROGRAM],
            input=json.dumps(config),
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            # -m imports from the current folder first, which must be the one that this package comes from.
            cwd=Path(__file__).parents[2],
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no model after {TIME_LIMIT_S} s"}
    except OSError as error:
        return {"error": f"a child process that cannot be started ({error.strerror})"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = done.stderr.strip().rpartition("\n")[2]
        return {"error": f"a child process that failed with exit code {done.returncode} ({last})"}
    result: dict[str, Any] = parse_json(lines[-1])
    return result
