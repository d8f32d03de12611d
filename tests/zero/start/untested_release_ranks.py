"""Start engines under the version of an untested release of DeepSpeed, and print the results.

With two ranks, a name is missing on one of them only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig

from deep_opt_states import zero
from deep_opt_states.zero.internals.agreement import RanksDisagree
from deep_opt_states.zero.start import refusals, release
from deep_opt_states.zero.start.unsupported import Unsupported
from tests.launch import answer
from tests.zero.process_group import process_group

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "deep_optimizer_states": {"placement": "cpu"},
}


def start(*, version: str = "0.20.0") -> str:
    """Return the class of an engine's optimizer, or the message of the refusal."""
    with mock.patch.object(deepspeed, "__version__", version):
        try:
            engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=CONFIG)
        except (Unsupported, RanksDisagree) as refusal:
            return str(refusal)
        name = type(engine.optimizer).__name__
        engine.destroy()
        return name


def without_a_private_name() -> AbstractContextManager[object]:
    return mock.patch.object(release, "missing_names", return_value=["Engine._hook is missing"])


def without_an_attribute() -> AbstractContextManager[object]:
    """Let a rule read a public attribute of DeepSpeed's config that does not exist."""
    rule = refusals.Rule("zenflow", "must be absent", "Remove it.", lambda config: config.zero_config.gone)
    return mock.patch.object(refusals, "_CONFIG", (rule,))


@contextmanager
def without_a_module() -> Iterator[None]:
    """Import the plugin again at its next use, without a module of DeepSpeed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "deep_opt_states.zero.plugin")
        patch.delattr(zero, "plugin")
        patch.setitem(sys.modules, "deepspeed.runtime.zero.offload_config", None)
        yield


def main() -> None:
    """Start an engine in each situation."""
    answer({"name": "all names", "found": start()})
    answer({"name": "all names, again", "found": start()})
    answer({"name": "another release", "found": start(version="0.21.0")})
    # The private names of a release are looked for once.
    with without_a_private_name():
        answer({"name": "private name", "found": start(version="0.20.1")})
    for name, situation in (("attribute", without_an_attribute()), ("module", without_a_module())):
        with situation:
            answer({"name": name, "found": start()})


def start_on_two_ranks() -> None:
    """Start an engine after rank 0 alone has read a config, and one that only rank 1 refuses."""
    if dist.get_rank() == 0:
        DeepSpeedConfig(CONFIG)
    answer({"name": "accepted", "found": start()})
    with without_an_attribute_of_the_engine() if dist.get_rank() == 1 else nullcontext():
        answer({"name": "refused on rank 1", "found": start()})


def without_an_attribute_of_the_engine() -> AbstractContextManager[object]:
    """Let the check of an engine, which all ranks make together, miss a name."""
    plugin = sys.modules["deep_opt_states.zero.plugin"]
    return mock.patch.object(plugin, "warn_of_untested_release", side_effect=AttributeError("gone"))


if __name__ == "__main__":
    with process_group():
        if dist.get_world_size() == 1:
            main()
        else:
            start_on_two_ranks()
