"""Make calls in orders that could commit a step of old gradients: eager units have the bits of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch

from tests.ranks import ranks
from tests.zero.speculations import counted_speculations, wait_for_speculations

WIDTH = 64


class TwoLayers(torch.nn.Module):
    """Two layers, of which forward may leave out the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, inputs: torch.Tensor, layers: int = 2) -> torch.Tensor:
        hidden = self.first(inputs)
        return (self.second(hidden) if layers == 2 else hidden).float().square().sum()


def engine_of(*, eager: bool, accumulation: int = 1) -> Any:
    torch.manual_seed(1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        # DeepSpeed's default clips, which would make each speculation void.
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": WIDTH**2,
            "reduce_bucket_size": WIDTH**2,
        },
        "deep_optimizer_states": {"placement": "cpu", "eager": eager},
    }
    model = TwoLayers()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def backward(engine: Any, seed: int, layers: int = 2) -> None:
    """Run backward, and wait until the steps that it has started are done."""
    generator = torch.Generator().manual_seed(seed)
    engine.backward(engine(torch.randn(4, WIDTH, generator=generator).bfloat16(), layers))
    wait_for_speculations(engine)


def after_an_interrupted_step(engine: Any) -> None:
    """Interrupt a step when the gradients are complete. The next backward does not reach the second layer."""
    backward(engine, 0)
    engine.step()
    backward(engine, 1)
    interrupted = mock.patch.object(engine.optimizer, "_optimizer_step", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        engine.step()
    backward(engine, 2, layers=1)
    engine.step()


def after_a_boundary_that_was_none(engine: Any) -> None:
    """Run another micro-batch after one that was declared the last."""
    engine.set_gradient_accumulation_boundary(True)
    backward(engine, 0)
    engine.set_gradient_accumulation_boundary(False)
    backward(engine, 1)
    engine.set_gradient_accumulation_boundary(True)
    engine.step()


def with_a_learning_rate_in_a_tensor(engine: Any) -> None:
    """Change the learning rate in place between backward and the step."""
    rate = torch.tensor(1e-2)
    engine.optimizer.param_groups[0]["lr"] = rate
    for seed in range(3):
        backward(engine, seed)
        rate.mul_(0.5)
        engine.step()


@pytest.mark.promise("P1")
@pytest.mark.parametrize(
    ("order", "accumulation"),
    [(after_an_interrupted_step, 1), (after_a_boundary_that_was_none, 2), (with_a_learning_rate_in_a_tensor, 1)],
)
@ranks(1)
def test_no_order_of_calls_commits_a_step_of_old_gradients_or_of_an_old_learning_rate(
    order: Callable[[Any], None], accumulation: int
) -> None:
    found = []
    for eager in (False, True):
        engine = engine_of(eager=eager, accumulation=accumulation)
        with counted_speculations() as counts:
            order(engine)
        found.append([master.clone() for master in engine.optimizer.fp32_partitioned_groups_flat])
        engine.destroy()
    in_place, out_of_place = found
    assert all(map(torch.equal, in_place, out_of_place))
    assert counts.void > 0
