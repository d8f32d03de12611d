"""Check the warning and the refusals for an untested release of DeepSpeed, by faking the installed version."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from io import StringIO
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
from tests.ranks import ranks

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


def without_an_attribute_of_the_engine() -> AbstractContextManager[object]:
    """Let the check of an engine, which all ranks make together, miss a name."""
    plugin = sys.modules["deep_opt_states.zero.plugin"]
    return mock.patch.object(plugin, "warn_of_untested_release", side_effect=AttributeError("gone"))


PLUGIN = "DeepOptimizerStates_Stage3"
pytestmark = pytest.mark.promise("P6")


@ranks(1)
def test_a_release_with_all_names_is_used_with_one_warning() -> None:
    with redirect_stdout(StringIO()) as output:
        assert [start(), start(), start(version="0.21.0")] == [PLUGIN] * 3
    logged = output.getvalue()
    assert logged.count("DeepSpeed 0.20.0 was not tested with deep_opt_states") == 1
    assert logged.count("DeepSpeed 0.21.0 was not tested with deep_opt_states") == 1


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        (without_a_private_name, "Engine._hook is missing"),
        (without_an_attribute, "'DeepSpeedZeroConfig' object has no attribute 'gone'"),
        (without_a_module, "import of deepspeed.runtime.zero.offload_config"),
    ],
)
@ranks(1)
def test_a_release_that_lacks_a_name_is_refused_with_that_name(
    situation: Callable[[], AbstractContextManager[object]], expected: str
) -> None:
    with situation():
        rule, missing, remedy = start().splitlines()
    assert rule.endswith(", an untested release that lacks")
    assert expected in missing
    assert remedy == "Install one that was tested: pip install deepspeed==0.19.8."


@ranks(2)
def test_every_rank_raises_if_one_refuses_and_none_waits_for_a_rank_that_has_read_a_config() -> None:
    """Start an engine after rank 0 alone has read a config, and one that only rank 1 refuses."""
    if dist.get_rank() == 0:
        DeepSpeedConfig(CONFIG)
    assert start() == PLUGIN
    with without_an_attribute_of_the_engine() if dist.get_rank() == 1 else nullcontext():
        refused = start()
    expected = ("rank 1: ", "an untested release that lacks\n  gone\n")[dist.get_rank()]
    assert expected in refused
