"""An overflow on some of the ranks that share a model makes all of them skip the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.accelerator import get_accelerator

from deep_opt_states.zero.step import norms
from tests.ranks import ranks
from tests.zero.behaviour.behaviour_variant import (
    FP16,
    BehaviourNet,
    BehaviourVariant,
    Scenario,
    Seen,
    counters,
    final_states,
    inputs,
    loss_of,
    run,
)
from tests.zero.behaviour.states import SingleRankGroups

STEPS = 7
OVERFLOWS = {1: (1,), 3: (0, 1), 4: (1,)}
"""The ranks whose gradients overflow, by step."""


class ModelParallelRanks(SingleRankGroups):
    """An ``mpu`` whose model-parallel group contains all ranks and whose data-parallel groups contain one rank each."""

    def __init__(self, data_parallel: Any, model_parallel: Any) -> None:
        super().__init__(data_parallel)
        self._model_parallel = model_parallel

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_model_parallel_group(self) -> Any:
        return self._model_parallel


@contextmanager
def logged_reductions() -> Iterator[list[str]]:
    """Yield a list to which every all-reduce inside is appended, in order."""
    reductions: list[str] = []
    all_reduce = comm.all_reduce

    def logged(tensor: Any, op: Any = comm.ReduceOp.SUM, group: Any = None, **options: Any) -> Any:
        reductions.append(f"{op} of {tensor.numel()} among {dist.get_world_size(group)}")
        return all_reduce(tensor, op=op, group=group, **options)

    with mock.patch.object(comm, "all_reduce", logged):
        yield reductions


def train(variant: BehaviourVariant, mpu: Any, overflows: dict[int, tuple[int, ...]]) -> Seen:
    model = BehaviourNet()
    for param in model.parameters():
        # Mark the parameter as Megatron's layers do: its norm is summed over the ranks of the model-parallel group.
        param.model_parallel = True  # type: ignore[attr-defined]
    engine = variant.engine(
        model,
        {"mpu": mpu, "dist_init_required": False},
        **{**FP16, "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 100, "hysteresis": 1}},
        gradient_clipping=0.1,
    )
    for step in range(STEPS):
        loss = loss_of(engine(inputs(step, model.layers[0].weight.dtype)))
        if dist.get_rank() in overflows.get(step, ()):
            loss = loss * 1e30
        engine.backward(loss)
        with logged_reductions() as reductions:
            engine.step()
        yield "loss", loss.detach()
        yield "reductions", " ".join(flags_and_norms(reductions))
        yield from counters(engine)
    yield from final_states(engine)


def flags_and_norms(reductions: list[str]) -> list[str]:
    """Return the reductions of one element, without the plugin's own, in which the ranks agree on a failed update."""
    return [reduction for reduction in reductions if " of 1 " in reduction]


def overflow_on_one_model_parallel_rank(variant: BehaviourVariant) -> Seen:
    mpu = ModelParallelRanks(*groups())
    yield from train(variant, mpu, OVERFLOWS)


def no_model_parallel_group(variant: BehaviourVariant) -> Seen:
    data_parallel, _ = groups()
    yield from train(variant, SingleRankGroups(data_parallel), {})


def groups() -> tuple[Any, Any]:
    """Return this rank's data-parallel group and the model-parallel group."""
    ranks = range(dist.get_world_size())
    return [dist.new_group([rank]) for rank in ranks][dist.get_rank()], dist.new_group(list(ranks))


class ReducedLate:
    """A reduction that delivers the overflow of another rank only when it is waited for."""

    def __init__(self, flag: torch.Tensor) -> None:
        self._flag = flag

    def wait(self) -> None:
        self._flag.fill_(1)


def test_the_flag_is_not_read_before_its_reduction_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check with experts that are distributed over the ranks.

    The norms, whose computation would wait for all reductions, are stock's then.
    """
    monkeypatch.setattr(norms.dist, "all_reduce", lambda tensor, **_: ReducedLate(tensor))
    optimizer = SimpleNamespace(
        model_parallel_group=None,
        _autoep_expert_parallel_group=lambda params: "experts",
        _model_parallel_all_reduce=lambda **_: None,
        fp16_groups=[["param"]],
        get_param_id=hash,
        norm_for_param_grads={},
        dp_process_group=None,
    )
    assert norms.Norms(optimizer).overflow()


@pytest.mark.parametrize("scenario", [overflow_on_one_model_parallel_rank, no_model_parallel_group])
@ranks(2)
def test_ranks_that_share_a_model_skip_a_step_together(scenario: Scenario) -> None:
    """Check that all ranks finish: otherwise they wait forever in the reduction of the norm, until they are killed.

    Without a model-parallel group, the plugin issues the same reductions as stock.
    """
    # DeepSpeed requires instructions that this CPU may lack, although PyTorch computes in fp16 on every CPU.
    get_accelerator().is_fp16_supported = lambda: True
    found = run(scenario)
    assert found["differences"] == []
    assert found["seen"] > 50
