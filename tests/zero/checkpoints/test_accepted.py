"""Check that the check of a checkpoint's files refuses no valid checkpoint, and that no rank waits for another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from deep_opt_states.zero.internals.lr_schedulers import problem_of_scheduler
from tests.zero.checkpoints.accepted_ranks import JOBS
from tests.zero.training_once import ProgramRanks, TrainingOnce, on_one_worker

RANKS = ProgramRanks("tests.zero.checkpoints.accepted_ranks", timeout_s=300)


@on_one_worker(RANKS.program)
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.promise("P4")
def test_a_valid_checkpoint_is_loaded_as_by_stock(job: str, trained: TrainingOnce) -> None:
    answers, *_ = trained.answers_by_name(2)
    assert answers[job]["problems"] == []


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
