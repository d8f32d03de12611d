"""Check that unsupported settings are refused at start, with the rule, the value found and the remedy."""

from __future__ import annotations

import gc
import threading
import traceback
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
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
from tests.zero.start.attempts import ATTEMPTS, BASE, NO_OPTIMIZER, config_with, second_group


def attempt(changes: dict[str, Any], arguments: dict[str, Any], patch: AbstractContextManager[Any]) -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(6, 5, bias=False), torch.nn.Linear(5, 4, bias=False))
    for param in model.parameters():
        param.use_muon = True
    try:
        with patch:
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=config_with(changes), **arguments
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


def attempt_under_zero_init() -> dict[str, Any]:
    model = None
    try:
        with deepspeed.zero.Init(config_dict_or_path=config_with({"zero_optimization.offload_optimizer.ratio": 0.5})):
            model = torch.nn.Linear(6, 5)
    except Unsupported as error:
        return {"type": "Unsupported", "message": str(error), "untouched": model is None}
    return {"type": "accepted", "message": ""}


def attempt_to_call_later_method() -> dict[str, Any]:
    """Call a method of the engine as if this release of DeepSpeed lacked it."""
    model = torch.nn.Linear(6, 5)
    with mock.patch.dict(refusals._LATER_METHODS, coalesce_grad_reduction="0.20.0"):
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config_with({}))
    try:
        with engine.coalesce_grad_reduction():
            pass
    except Unsupported as error:
        return {"type": "Unsupported", "message": str(error), "untouched": is_untouched(model)}
    return {"type": "accepted", "message": ""}


def own_threads() -> int:
    """Return the number of threads but for those of waits, which end at once but not before their wait does."""
    return sum(thread.name != waiting.THREAD for thread in threading.enumerate())


class WithFrozen(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.layer.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)


NUMBERS = "Give Python numbers"

EXPECTED: dict[str, tuple[str, str]] = {
    "stage 0": ("zero_optimization.stage: must be 3, found 0", 'set "stage": 3'),
    "no zero_optimization": ("zero_optimization.stage: must be 3, found 0", 'set "stage": 3'),
    "stage 1": ("zero_optimization.stage: must be 3, found 1", 'set "stage": 3'),
    "stage 2": ("zero_optimization.stage: must be 3, found 2", 'set "stage": 3'),
    "no offload_optimizer": (
        'offload_optimizer.device: must be "cpu" or "nvme", found none',
        'Set "offload_optimizer"',
    ),
    "offload_optimizer none": (
        'offload_optimizer.device: must be "cpu" or "nvme", found none',
        'Set "offload_optimizer"',
    ),
    "nvme without a path": ('nvme_path: is needed with "device": "nvme", found nothing', "Set it to a folder"),
    "nvme without a folder": ("nvme_path: must be a folder, found none at /no/such/folder", "Create it"),
    "nvme in a folder of another user": ("nvme_path: must be writable by this user", "Name a folder of yours"),
    "nvme with fp32 moments of bf16 masters": ("bf16.bf16_optimizer_states: must be true with", "Set it, or use"),
    "host memory without nvme": ('host_memory_gb: belongs to "device": "nvme"', "Remove the key"),
    "nvme parameters": ('offload_param.device: must be "none" or "cpu", found nvme', 'set "device": "cpu"'),
    "ratio": ("offload_optimizer.ratio: must be 1", 'remove "ratio"'),
    "super_offload": ("offload_optimizer.super_offload: must be false, found True", 'remove "super_offload"'),
    "zenflow": ("zero_optimization.zenflow: must be absent, found topk_ratio=0.1", "Remove it"),
    "deepcompile": ("compile.deepcompile: must be false, found True", 'remove "deepcompile"'),
    "bf16 masters of an fp16 model": (
        'bf16.bf16_master_weights_and_grads: needs "enabled": true in the block "bf16", found True',
        "or remove the key",
    ),
    "fp16 master weights": ("fp16.fp16_master_weights_and_grads: must be false, found True", "remove it"),
    "fp16 autocast": ("torch_autocast.dtype: must not be float16, found torch.float16", "use bfloat16"),
    "muon": ('optimizer.type: must be "Adam" or "AdamW", or absent, found muon', '"type": "AdamW"'),
    "torch adam": ("optimizer: must be DeepSpeedCPUAdam", "pass deepspeed.ops.adam.DeepSpeedCPUAdam"),
    "sgd": (
        "found torch.optim.sgd.SGD.\nRemove",
        'Remove "zero_force_ds_cpu_optimizer": false, if the config contains it. Accelerate',
    ),
    "step hooks": ("optimizer (step hooks): must be none, found 1", "remove them"),
    "quantised gradients": ("zero_quantized_gradients: must be false, found True", "remove it"),
    "datastates": ("datastates_ckpt: must be absent, found {}", "decoupled writer saves in the background"),
    "deepspeed 0.17.5": ("must be version 0.17.6 or later", "pip install deepspeed==0.19.8"),
    "caller accumulates with 0.19.4": (
        "managed_gradient_accumulation: needs DeepSpeed 0.19.5 or later with ZeRO-3 and offloading, found 0.19.4",
        "or remove the key",
    ),
    "AutoTP with 0.18.5": ("tensor_parallel: needs DeepSpeed 0.19.4 or later", "or remove the key"),
    "AutoEP with 0.18.5": ("expert_parallel: needs DeepSpeed 0.19.3 or later", "or remove the key"),
    "method of a later release": (
        "engine.coalesce_grad_reduction() needs DeepSpeed 0.20.0 or later, found",
        "or remove the call",
    ),
    "another accelerator": ('must be "cuda" or "cpu", found \'xpu\'', '"enabled": false'),
    "streamed on a GPU": ("placement: streamed and resident units need a GPU Adam kernel", '"placement": "cpu"'),
    "stage 0, client optimizer": ("zero_optimization.stage: must be 3, found 0", 'set "stage": 3'),
    "no offload_optimizer, client optimizer": (
        'offload_optimizer.device: must be "cpu" or "nvme", found none',
        'Set "offload_optimizer"',
    ),
    "under zero.Init": ("offload_optimizer.ratio: must be 1", 'remove "ratio"'),
    "no optimizer, misspelled placement": (
        'placement: must be "planned"',
        'Did you mean [{"match": "*", "states": "resident"}]',
    ),
    "no learning rate": ("must be numbers, and betas two numbers, in every param group, found lr=None", NUMBERS),
    "learning rate in a tensor": ("found lr=tensor(0.0010) in param group 1", NUMBERS),
    "eps of adafactor": ("found eps=(1e-30, 0.001) in param group 1", 'choose "adamw_torch"'),
    "weight decay as a string": ("found weight_decay='0.1' in param group 1", NUMBERS),
    "three betas": ("found betas=(0.9, 0.99, 0.999) in param group 1", NUMBERS),
    "one beta": ("found betas=0.9 in param group 1", NUMBERS),
    "no beta": ("found betas=(None, 0.999) in param group 1", NUMBERS),
    "amsgrad": ("amsgrad and maximize must be false, found amsgrad=True in param group 1", "remove it"),
    "maximize": ("amsgrad and maximize must be false, found maximize=True in param group 1", "remove it"),
}

PLUGIN = "DeepOptimizerStates_Stage3"

ACCEPTED = {
    "numbers of other types": PLUGIN,
    "keys of PyTorch's AdamW": PLUGIN,
    "moments in the dtype of fp32 masters": PLUGIN,
    "bf16 master weights": PLUGIN,
    "bf16 optimizer states": PLUGIN,
    "no optimizer": "DeepSpeedZeRoOffload",
    "no optimizer, no offload": "DeepSpeedZeRoOffload",
    "no optimizer, stage 0": "BF16_Optimizer",
    "no optimizer, everything else refused": "DeepSpeedZeRoOffload",
}

REFUSED_WITH_THE_OPTIMIZER = {
    *("torch adam", "sgd", "another accelerator", "streamed on a GPU", "step hooks"),
    *("no learning rate", "learning rate in a tensor", "eps of adafactor", "weight decay as a string", "three betas"),
    *("one beta", "no beta", "amsgrad", "maximize"),
}
"""Attempts that are refused when DeepSpeed makes the optimizer: it has converted the model, but made no states yet."""

Answers = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def answers() -> Answers:
    """Return the outcome of each attempt. All are made in one process."""
    found: Answers = on_ranks(1, outcomes)[0]
    return found


def outcomes() -> Answers:
    get_accelerator().is_fp16_supported = lambda: True
    with redirect_stdout(StringIO()) as output:
        found = {name: attempt(*arguments) for name, arguments in ATTEMPTS.items()}
    # Each engine without an optimizer logs one line.
    logged = output.getvalue().count("an engine without an optimizer runs as stock DeepSpeed")
    assert logged == sum(name.startswith("no optimizer") for name in ACCEPTED)
    return {
        **found,
        "under zero.Init": attempt_under_zero_init(),
        "method of a later release": attempt_to_call_later_method(),
    }


in_one_worker = pytest.mark.xdist_group("refusals")


def test_every_attempt_is_expected() -> None:
    others = {"under zero.Init", "method of a later release"}
    assert ATTEMPTS.keys() | others == EXPECTED.keys() | ACCEPTED.keys()


@in_one_worker
@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.promise("P6")
def test_an_unsupported_feature_is_refused_with_rule_value_and_remedy(name: str, answers: Answers) -> None:
    rule, remedy = EXPECTED[name]
    answer = answers[name]
    assert answer["type"] in ("Unsupported", "ConfigError"), answer["message"]
    assert rule in answer["message"]
    assert "found" in answer["message"]
    assert remedy in answer["message"]


@in_one_worker
@pytest.mark.parametrize(
    "name", [name for name in EXPECTED if name not in {*REFUSED_WITH_THE_OPTIMIZER, "method of a later release"}]
)
def test_an_unsupported_feature_is_refused_before_the_model_is_partitioned(name: str, answers: Answers) -> None:
    assert answers[name]["untouched"]


@in_one_worker
@pytest.mark.parametrize("name", ACCEPTED)
def test_a_supported_config_is_accepted(name: str, answers: Answers) -> None:
    answer = answers[name]
    assert answer["type"] == "accepted", answer["message"]
    assert answer["message"] == ACCEPTED[name]


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
    wrong_rule = attempt({"deep_optimizer_states": block}, {}, nullcontext())
    assert wrong_rule["type"] == ("RanksDisagree", "ConfigError")[rank]
    assert "placement[0].match: must match a parameter of the model" in wrong_rule["message"]
    threads = own_threads()
    hyperparameters: dict[str, Any] = {"lr": None} if rank == 1 else {}
    refused = attempt(NO_OPTIMIZER, {"optimizer": second_group(**hyperparameters)}, nullcontext())
    assert refused["type"] == ("RanksDisagree", "Unsupported")[rank]
    assert "found lr=None in param group 1" in refused["message"]
    gc.collect()
    assert [type(engine) for engine in gc.get_objects() if type(engine) is DeepOptimizerStates_Stage3] == []
    assert own_threads() == threads
    assert attempt({}, {}, nullcontext()) == {"type": "accepted", "message": PLUGIN}
