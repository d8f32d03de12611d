"""Check what is read of a checkpoint before it is loaded: states of schedulers, and how modules load themselves."""

from __future__ import annotations

from functools import wraps
from typing import Any

import pytest
import torch
from torch.ao.quantization import PerChannelMinMaxObserver
from torch.optim import lr_scheduler

from deep_opt_states.zero.checkpoint_contents import shown
from deep_opt_states.zero.internals.compat import has_custom_loading
from deep_opt_states.zero.internals.lr_schedulers import problem_of_scheduler


def make_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def scheduler_of(kind: str) -> Any:
    optimizer = make_optimizer()
    constant = lr_scheduler.ConstantLR(optimizer)
    of_lambda = lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return {
        "LambdaLR": of_lambda,
        "ChainedScheduler": lr_scheduler.ChainedScheduler([constant, of_lambda], optimizer),
        "CyclicLR": lr_scheduler.CyclicLR(optimizer, 0.1, 0.2, cycle_momentum=False),
        "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau(optimizer),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "saved"),
    [
        ("LambdaLR", None),
        ("LambdaLR", {}),
        ("LambdaLR", {"lr_lambdas": [None, {}]}),
        ("LambdaLR", {"lr_lambdas": [3]}),
        ("ChainedScheduler", {"_schedulers": None}),
        ("ChainedScheduler", {"_schedulers": [{}, {}]}),
        ("ChainedScheduler", {"_schedulers": [{}] * 3}),
        ("CyclicLR", {"mode": "triangular"}),
        ("CyclicLR", {"_scale_fn_custom": {"gamma": 1.0}}),
        ("ReduceLROnPlateau", {"mode": "text"}),
    ],
)
def test_the_state_of_a_scheduler_that_pytorch_cannot_load_is_refused(kind: str, saved: Any) -> None:
    scheduler = scheduler_of(kind)
    found = problem_of_scheduler(scheduler, saved)
    assert found is not None
    assert " must " in found
    with pytest.raises((AttributeError, IndexError, KeyError, TypeError, ValueError)):
        scheduler.load_state_dict(saved)


@pytest.mark.parametrize(
    ("kind", "saved"),
    [
        ("LambdaLR", {"lr_lambdas": []}),
        ("LambdaLR", {"lr_lambdas": [None, None]}),
        ("LambdaLR", {"lr_lambdas": [{"factor": 2}], "another": "entry"}),
        ("ChainedScheduler", {"_schedulers": [{"factor": 2}]}),
        ("ReduceLROnPlateau", {}),
    ],
)
def test_the_state_of_a_scheduler_that_pytorch_loads_is_accepted(kind: str, saved: Any) -> None:
    scheduler = scheduler_of(kind)
    assert problem_of_scheduler(scheduler, saved) is None
    scheduler.load_state_dict(saved)


class OwnScheduler:
    """A scheduler of a user, which decides itself how its state is saved."""

    def state_dict(self) -> Any:
        return [3]

    def load_state_dict(self, state: Any) -> None:
        (self.steps,) = state


def test_the_state_of_a_scheduler_of_a_user_need_not_be_a_dict() -> None:
    assert problem_of_scheduler(OwnScheduler(), [3]) is None


class ForwardingScheduler:
    """A scheduler that has no methods, and forwards its attributes to another one."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_the_state_of_a_scheduler_that_forwards_its_methods_is_accepted() -> None:
    scheduler = ForwardingScheduler(scheduler_of("LambdaLR"))
    assert problem_of_scheduler(scheduler, scheduler.state_dict()) is None


def with_own_load() -> torch.nn.Module:
    module = torch.nn.Linear(1, 1)
    module._load_from_state_dict = lambda *arguments: None
    return module


def with_wrapped_load() -> torch.nn.Module:
    """Return a module whose load is wrapped, by a function with the name of the module of PyTorch."""
    module = torch.nn.Linear(1, 1)
    method = module._load_from_state_dict
    module._load_from_state_dict = wraps(method)(lambda *arguments: method(*arguments))
    return module


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (torch.nn.Linear(1, 1), False),
        (torch.nn.Sequential(with_wrapped_load()), True),
        (torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.InstanceNorm1d(1), torch.nn.LSTM(1, 1)), False),
        (torch.nn.Sequential(torch.nn.Sequential(PerChannelMinMaxObserver())), True),
        (torch.nn.Sequential(with_own_load()), True),
    ],
)
def test_a_module_that_overrides_how_it_loads_is_known(module: torch.nn.Module, expected: bool) -> None:
    assert has_custom_loading(module) == expected


@pytest.mark.parametrize("register", ["register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"])
def test_a_module_with_a_hook_for_loading_is_known(register: str) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(1, 1))
    getattr(module[0], register)(lambda *arguments: None)
    assert has_custom_loading(module)


class Textless(Exception):
    """An object whose text cannot be made."""

    def __str__(self) -> str:
        raise KeyError

    __repr__ = __str__


@pytest.mark.parametrize("value", [Textless(), [Textless()], {Textless(): 1}])
def test_an_object_without_text_is_described_by_its_type(value: object) -> None:
    assert shown(value) == f"an object of type {type(value).__name__} whose text raises KeyError"
