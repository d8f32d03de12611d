"""Start engines under the version of a DeepSpeed release that was never tried, and print the results.

Argument: a temporary folder, in which the results of tiny trainings are cached.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import deepspeed
import torch

from deep_opt_states.zero.start import verification
from tests.launch import answer
from tests.zero.process_group import process_group


def start(untested_deepspeed: str) -> str:
    """Return the class of an engine's optimizer, or the message of the refusal."""
    verification._accepted.clear()
    verification.differences_of.cache_clear()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "deep_optimizer_states": {"placement": "cpu", "untested_deepspeed": untested_deepspeed},
    }
    try:
        engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)
    except verification.Unsupported as refusal:
        return str(refusal)
    name = type(engine.optimizer).__name__
    engine.destroy()
    return name


@contextmanager
def training(name: str) -> Iterator[None]:
    """Let another module be the tiny training."""
    with mock.patch.object(verification, "TRAINING", name):
        yield


def main(folder: str) -> None:
    """Start an engine in each situation."""
    os.environ["XDG_CACHE_HOME"] = folder
    # As under torchrun, whose ranks find their store through this variable.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    with mock.patch.object(deepspeed, "__version__", "0.20.0"):
        answer({"name": "verified", "found": start("verify")})
        with training("no_module_that_exists"):
            answer({"name": "cached", "found": start("verify")})
        answer({"name": "refused by the config", "found": start("refuse")})
    with mock.patch.object(deepspeed, "__version__", "0.20.1"):
        with training("tests.zero.start.seeded_tiny_training"):
            answer({"name": "seeded difference", "found": start("verify")})
        answer({"name": "difference cached", "found": start("verify")})
    with mock.patch.object(deepspeed, "__version__", "0.20.2"):
        with training("no_module_that_exists"):
            answer({"name": "training fails", "found": start("verify")})
        with training("tests.zero.start.differing_training"):
            answer({"name": "trains again after a failure", "found": start("verify")})
        with mock.patch.object(verification, "missing_names", return_value=["Engine._hook is missing"]):
            answer({"name": "missing name", "found": start("verify")})


if __name__ == "__main__":
    with process_group():
        main(sys.argv[1])
