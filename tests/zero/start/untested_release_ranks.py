"""Start engines under the version of a DeepSpeed release that was never tried, and print the results.

Argument: a temporary folder, in which the results of tiny trainings are cached. Two ranks start engines without tiny
trainings, whose results differ between the ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig

from deep_opt_states import zero
from deep_opt_states.zero.internals.agreement import RanksDisagree
from deep_opt_states.zero.start import refusals, verification
from deep_opt_states.zero.start.unsupported import Unsupported
from tests.launch import answer
from tests.zero.process_group import process_group


def config_with(untested_deepspeed: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "deep_optimizer_states": {"placement": "cpu", "untested_deepspeed": untested_deepspeed},
    }


def start(untested_deepspeed: str) -> str:
    """Return the class of an engine's optimizer, or the message of the refusal."""
    verification._accepted.clear()
    verification.differences_of.cache_clear()
    try:
        engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config_with(untested_deepspeed))
    except (Unsupported, RanksDisagree) as refusal:
        return str(refusal)
    name = type(engine.optimizer).__name__
    engine.destroy()
    return name


@contextmanager
def training(name: str) -> Iterator[None]:
    """Let another module be the tiny training."""
    with mock.patch.object(verification, "TRAINING", name):
        yield


def without_an_attribute() -> AbstractContextManager[object]:
    """Let a rule read a public attribute of DeepSpeed's config that does not exist."""
    rule = refusals.Rule("zenflow", "must be absent", "Remove it.", lambda config: config.zero_config.gone, bool)
    return mock.patch.object(refusals, "_CONFIG", (rule,))


@contextmanager
def without_a_module() -> Iterator[None]:
    """Import the plugin again at its next use, without a module of DeepSpeed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "deep_opt_states.zero.plugin")
        patch.delattr(zero, "plugin")
        patch.setitem(sys.modules, "deepspeed.runtime.superoffload", None)
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
    with mock.patch.object(deepspeed, "__version__", "0.20.3"):
        for name in ("prints_null", "fails_at_its_end"):
            with training(f"tests.zero.start.{name}"):
                answer({"name": name, "found": start("verify")})
    with mock.patch.object(deepspeed, "__version__", "0.20.4"):
        with without_an_attribute():
            answer({"name": "missing attribute", "found": start("verify")})
            answer({"name": "missing attribute, refused by the config", "found": start("refuse")})
        with without_a_module():
            answer({"name": "missing module", "found": start("verify")})


def start_on_two_ranks() -> None:
    """Start an engine after rank 0 alone has read a config, and one that only rank 1 refuses."""
    with mock.patch.object(deepspeed, "__version__", "0.20.0"):
        if dist.get_rank() == 0:
            DeepSpeedConfig(config_with("verify"))
        for name, refusing_rank in (("accepted", None), ("refused on rank 1", 1)):
            found = ["master of sub-group 0"] if dist.get_rank() == refusing_rank else []
            differences = mock.create_autospec(verification.differences_of, return_value=found)
            with mock.patch.object(verification, "differences_of", differences):
                answer({"name": name, "found": start("verify")})


if __name__ == "__main__":
    with process_group():
        if dist.get_world_size() == 1:
            main(sys.argv[1])
        else:
            start_on_two_ranks()
