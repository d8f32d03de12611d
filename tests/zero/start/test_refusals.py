"""Check that unsupported settings are refused at start, with the rule, the value found and the remedy."""

from __future__ import annotations

import gc
import threading
import traceback
from contextlib import redirect_stdout
from io import StringIO
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam

from deep_opt_states import waiting
from deep_opt_states.config import ConfigError
from deep_opt_states.zero.internals.agreement import RanksDisagree
from deep_opt_states.zero.stage3 import DeepOptimizerStates_Stage3
from deep_opt_states.zero.start import refusals
from deep_opt_states.zero.start.unsupported import Unsupported
from tests.ranks import on_ranks, ranks
from tests.zero.start.attempts import (
    ACCEPTED,
    BASE,
    NO_OPTIMIZER,
    PLUGIN,
    REFUSED,
    Attempt,
    config_with,
    second_group,
)


def outcome(attempt: Attempt) -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(6, 5, bias=False), torch.nn.Linear(5, 4, bias=False))
    for param in model.parameters():
        param.use_muon = True
    arguments = {} if attempt.optimizer is None else {"optimizer": attempt.optimizer}
    try:
        with attempt.patch:
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=config_with(attempt.changes), **arguments
            )
        if engine.basic_optimizer is not None:
            engine.backward(engine(torch.ones(1, 6, dtype=torch.bfloat16)).sum())
            engine.step()
    except (Unsupported, ConfigError, RanksDisagree) as error:
        return {"type": type(error).__name__, "message": str(error), "untouched": is_untouched(model)}
    except Exception:  # noqa: BLE001 (the test shows the traceback)
        return {"type": "other", "message": traceback.format_exc()}
    return {"type": "accepted", "message": type(engine.optimizer).__name__}


def is_untouched(model: torch.nn.Module) -> bool:
    """Return whether DeepSpeed has neither partitioned nor converted ``model``."""
    return all(not hasattr(param, "ds_id") and param.dtype is torch.float32 for param in model.parameters())


def own_threads() -> int:
    """Return the number of threads but for those of waits, which end at once but not before their wait does."""
    return sum(thread.name != waiting.THREAD for thread in threading.enumerate())


class WithFrozen(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.layer.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)


Answers = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def answers() -> Answers:
    """Return the outcome of each attempt. All are made in one process."""
    found: Answers = on_ranks(1, outcomes)[0]
    return found


def outcomes() -> Answers:
    get_accelerator().is_fp16_supported = lambda: True
    with redirect_stdout(StringIO()) as output:
        found = {name: outcome(attempt) for name, attempt in {**REFUSED, **ACCEPTED}.items()}
    # Each engine without an optimizer logs one line.
    logged = output.getvalue().count("an engine without an optimizer runs as stock DeepSpeed")
    assert logged == sum(name.startswith("no optimizer") for name in ACCEPTED)
    return found


in_one_worker = pytest.mark.xdist_group("refusals")


@in_one_worker
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.promise("P6")
def test_an_unsupported_feature_is_refused_with_rule_value_and_remedy(name: str, answers: Answers) -> None:
    found, attempt = answers[name], REFUSED[name]
    assert found["type"] in ("Unsupported", "ConfigError"), found["message"]
    assert attempt.rule in found["message"]
    assert "found" in found["message"]
    assert attempt.remedy in found["message"]


@in_one_worker
@pytest.mark.parametrize("name", [name for name, attempt in REFUSED.items() if not attempt.converts])
def test_an_unsupported_feature_is_refused_before_the_model_is_partitioned(name: str, answers: Answers) -> None:
    assert answers[name]["untouched"]


@in_one_worker
@pytest.mark.parametrize("name", ACCEPTED)
def test_a_supported_config_is_accepted(name: str, answers: Answers) -> None:
    assert answers[name] == {"type": "accepted", "message": ACCEPTED[name].accepted_with}


@pytest.mark.promise("P6")
@ranks(1)
def test_an_unsupported_feature_is_refused_under_zero_init_before_the_model_is_made() -> None:
    ratio = REFUSED["ratio"]
    model = None
    with pytest.raises(Unsupported) as refused, deepspeed.zero.Init(config_dict_or_path=config_with(ratio.changes)):
        model = torch.nn.Linear(6, 5)
    assert ratio.rule in str(refused.value)
    assert ratio.remedy in str(refused.value)
    assert model is None


@pytest.mark.promise("P6")
@ranks(1)
def test_a_method_that_this_release_lacks_is_refused_when_it_is_called() -> None:
    """Check it as if this release of DeepSpeed lacked a method of the engine."""
    model = torch.nn.Linear(6, 5)
    with mock.patch.dict(refusals._LATER_METHODS, coalesce_grad_reduction="0.20.0"):
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config_with({}))
    with pytest.raises(Unsupported) as refused, engine.coalesce_grad_reduction():
        pass
    assert "engine.coalesce_grad_reduction() needs DeepSpeed 0.20.0 or later, found" in str(refused.value)
    assert "or remove the call" in str(refused.value)


RULES_WITHOUT_EFFECT = {
    "matches nothing": (
        [{"match": "lm_heads.*", "states": "resident"}],
        "placement[0].match: must match a parameter of the model, found 'lm_heads.*'",
    ),
    "shadowed": (
        [{"match": "*", "states": "cpu"}, {"match": "*.weight", "states": "streamed"}],
        "placement[1].match: must match a parameter that no earlier rule matches",
    ),
    "a regular expression": (
        [{"match": r".*\\.weight$", "states": "cpu"}],
        "placement[0].match: must match a parameter of the model, found",
    ),
    "only frozen": (
        [{"match": "*.frozen", "states": "cpu"}],
        "placement[0].match: must match a parameter that is trained",
    ),
}


@ranks(1)
def test_a_rule_without_effect_is_refused_before_a_kernel_is_loaded() -> None:
    for rules, message in RULES_WITHOUT_EFFECT.values():
        model = WithFrozen()
        config = {**BASE, "deep_optimizer_states": {"placement": rules}}
        no_kernel = mock.patch.object(DeepSpeedCPUAdam, "__init__", side_effect=AssertionError("a kernel was loaded"))
        with no_kernel, pytest.raises(ConfigError) as refused:
            deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        assert message in str(refused.value)
        assert not hasattr(model.layer.weight, "ds_id")


@ranks(1)
def test_rules_for_all_parameters_of_the_optimizer_accept_a_number_of_slots() -> None:
    """Check a model with a layer that requires gradients and is not given to the optimizer."""
    model = torch.nn.ModuleDict({"trained": torch.nn.Linear(4, 4), "other": torch.nn.Linear(4, 4)})
    block = {"placement": [{"match": "trained.*", "states": "streamed"}]}
    config = {**BASE, "deep_optimizer_states": block}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model["trained"].parameters(), config=config)
    assert type(engine.optimizer).__name__ == PLUGIN


@pytest.mark.promise("P6")
@ranks(2)
def test_a_refusal_on_one_rank_leaves_no_engine_and_no_thread_on_any() -> None:
    """Refuse on rank 1 alone, and train with the next engine."""
    rank = torch.distributed.get_rank()
    block = {"placement": [{"match": ("*", "lm_heads.*")[rank], "states": "cpu"}]}
    wrong_rule = outcome(Attempt(changes={"deep_optimizer_states": block}))
    assert wrong_rule["type"] == ("RanksDisagree", "ConfigError")[rank]
    assert "placement[0].match: must match a parameter of the model" in wrong_rule["message"]
    threads = own_threads()
    hyperparameters: dict[str, Any] = {"lr": None} if rank == 1 else {}
    refused = outcome(Attempt(changes=NO_OPTIMIZER, optimizer=second_group(**hyperparameters)))
    assert refused["type"] == ("RanksDisagree", "Unsupported")[rank]
    assert "found lr=None in param group 1" in refused["message"]
    gc.collect()
    assert [type(engine) for engine in gc.get_objects() if type(engine) is DeepOptimizerStates_Stage3] == []
    assert own_threads() == threads
    assert outcome(Attempt(changes={})) == {"type": "accepted", "message": PLUGIN}
