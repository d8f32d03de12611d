"""Assign states that no update can use on the last rank: every rank raises before anything is updated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deep_opt_states.zero.assigned_states import StateRefused
from deep_opt_states.zero.internals.agreement import RanksDisagree
from tests.ranks import ranks
from tests.zero.behaviour.behaviour_variant import (
    BehaviourNet,
    BehaviourVariant,
    Seen,
    inputs,
    loss_of,
    seen,
    train,
    unequal,
)
from tests.zero.behaviour.states import BLOCKS, states


def assign(index: int, key: str, make: Callable[[torch.Tensor], Any]) -> Callable[[Any], object]:
    def write(engine: Any) -> None:
        state = states(engine)[index]
        state[key] = make(state["exp_avg"])

    return write


def overlap_moments(engine: Any) -> None:
    state = states(engine)[1]
    numel = state["exp_avg"].numel()
    zeros = torch.zeros(numel + 1)
    state["exp_avg"], state["exp_avg_sq"] = zeros[:numel], zeros[1:]


def share_a_step(engine: Any) -> None:
    step = torch.tensor(10)
    for state in states(engine):
        state["step"] = step


def replace_a_state(engine: Any) -> None:
    engine.optimizer.state[engine.optimizer.fp32_partitioned_groups_flat[0]] = None


def replace_a_master(engine: Any) -> None:
    masters = engine.optimizer.fp32_partitioned_groups_flat
    masters[1] = masters[1].detach().bfloat16()


ADDED = torch.nn.Parameter(torch.ones(4))
BAD: dict[str, tuple[Callable[[Any], object], str]] = {
    "another dtype": (assign(0, "exp_avg", torch.Tensor.bfloat16), "torch.bfloat16 on cpu"),
    "another length": (assign(1, "exp_avg_sq", lambda moment: moment[1:]), "must be a contiguous tensor of"),
    "not contiguous": (assign(0, "exp_avg", lambda moment: moment.repeat_interleave(2)[::2]), "not contiguous"),
    "another device": (assign(0, "exp_avg", lambda moment: moment.to("meta")), "on meta"),
    "no tensor": (assign(0, "exp_avg", lambda moment: None), "found None"),
    "a step that is no integer": (assign(1, "step", lambda moment: 3.0), "must be a number of steps, found 3.0"),
    "a step below zero": (assign(1, "step", lambda moment: -1), "found -1"),
    "a missing moment": (lambda engine: states(engine)[0].pop("exp_avg_sq"), "'exp_avg_sq'"),
    "a shared tensor": (
        lambda engine: states(engine)[1].update(exp_avg=states(engine)[1]["exp_avg_sq"]),
        "memory that 2 states share",
    ),
    "overlapping tensors": (overlap_moments, "memory that 2 states share"),
    "a shared step": (share_a_step, "step must be a number or a tensor of its own in each state"),
    "a sparse tensor": (assign(0, "exp_avg", torch.Tensor.to_sparse), "torch.sparse_coo"),
    "no state": (replace_a_state, "The state of sub-group 0 must be a dictionary, found None"),
    "a missing master": (
        lambda engine: engine.optimizer.fp32_partitioned_groups_flat.pop(),
        "must hold one tensor for each of",
    ),
    "an added param group": (
        lambda engine: engine.optimizer.optimizer.add_param_group({"params": [ADDED], "lr": 0.5}),
        "found 2 with 1 added parameters",
    ),
    "an added parameter": (
        lambda engine: engine.optimizer.param_groups[0]["params"].append(ADDED),
        "found 1 with 1 added parameters",
    ),
    "a master of another dtype": (replace_a_master, "torch.bfloat16 on cpu"),
}


def repeating(variant: BehaviourVariant, bad: Sequence[str]) -> Seen:
    """Let the last rank refuse a step for each of ``bad``, repair the states, and take the step again."""
    engine = variant.engine(BehaviourNet())
    yield from train(engine, 2)
    engine.backward(loss_of(engine(inputs(2))))
    refuses = dist.get_rank() == dist.get_world_size() - 1
    masters = list(engine.optimizer.fp32_partitioned_groups_flat)
    before = [dict(state) for state in states(engine)]
    for name in bad:
        write, message = BAD[name]
        if refuses:
            write(engine)
        with pytest.raises(StateRefused if refuses else RanksDisagree) as refused:
            engine.step()
        expected = (message, ".\n") if refuses else ("refuse: [1]",)
        assert all(part in str(refused.value) for part in expected), (name, refused.value)
        engine.optimizer.fp32_partitioned_groups_flat[:] = masters
        del engine.optimizer.param_groups[1:]
        engine.optimizer.param_groups[0]["params"].clear()
        for master, state in zip(masters, before, strict=True):
            engine.optimizer.state[master] = dict(state)
    # The gradients of the step that was refused are still there.
    engine.step()
    yield from train(engine, 2, first=3)


@pytest.mark.P6
@ranks(2)
def test_a_state_that_cannot_be_updated_is_refused_and_the_step_can_be_repeated() -> None:
    stock = seen(partial(repeating, bad=()), None)
    for index, block in enumerate(BLOCKS):
        bad = list(BAD)[index :: len(BLOCKS)]
        assert unequal(stock, seen(partial(repeating, bad=bad), block)) == [], bad
