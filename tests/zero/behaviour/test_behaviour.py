"""Check that callers see the same with the plugin as with stock, in the scenarios of the folder's other modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch

from deep_opt_states.runtime.executor import Executor
from deep_opt_states.zero.step.eager import LAST_STEPS
from deep_opt_states.zero.step.gathers import Gathers
from deep_opt_states.zero.step.update import Update
from perf_model.schedule.host_layout import KEYS_OF_STATES
from tests.ranks import on_ranks, ranks
from tests.zero.behaviour import states, trainings
from tests.zero.behaviour.behaviour_variant import (
    BASE,
    BLOCK,
    BehaviourNet,
    BehaviourVariant,
    Scenario,
    Seen,
    final_states,
    inputs,
    loss_of,
    seen,
    slow_updates,
    train,
    unequal,
)
from tests.zero.behaviour.random_calls import compare_calls
from tests.zero.on_accelerator import GROUPS
from tests.zero.parity.case import CPU, RESIDENT, eager
from tests.zero.parity.training import (
    Block,
    Record,
    assert_same_bits,
    counted_speculations,
    recorded,
    shared_folder,
    wait_for_speculations,
)

SCENARIOS: dict[str, Scenario] = {
    name: function
    for module in (trainings, states)
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if function.__module__ == module.__name__ and [*inspect.signature(function).parameters] == ["variant"]
}
OF_STATES = (
    "fragments",
    "states_that_move",
    "moments_in_the_dtype_of_the_masters",
    "gradients_that_the_caller_changes",
    "states_assigned_before_a_skipped_step",
    "second_engines",
)
ON_DEVICE = ("fragments", "partitions_that_the_caller_replaces", "assigned_states", "second_engines")
"""The scenarios of ``make test`` on the GPU in software, where nothing is executed before it is waited for."""

QUICK: tuple[tuple[int, tuple[str, ...], str, str], ...] = (
    (1, tuple(SCENARIOS), "cpu", "fp32"),
    *((1, OF_STATES, "cpu", dtypes) for dtypes in KEYS_OF_STATES if dtypes != "fp32"),
    (2, ON_DEVICE, "software_gpu", "fp32"),
)
"""Starts of ranks: their number, the scenarios that run one after the other, the accelerator and the dtypes."""
THOROUGH = tuple(pytest.param(2, tuple(SCENARIOS), on, "fp32", marks=pytest.mark.thorough) for on in GROUPS)


@pytest.mark.P1
@pytest.mark.parametrize(("world_size", "names", "on", "dtypes"), [*QUICK, *THOROUGH])
def test_callers_see_the_same_values_as_with_stock(
    world_size: int, names: tuple[str, ...], on: str, dtypes: str
) -> None:
    on_ranks(world_size, compare, names, dtypes, group=GROUPS[on], timeout_s=900)


def compare(names: tuple[str, ...], dtypes: str) -> None:
    BASE["bf16"].update(dict.fromkeys(KEYS_OF_STATES[dtypes], True))
    for name in names:
        stock, ours = seen(SCENARIOS[name], None), seen(SCENARIOS[name], BLOCK)
        assert unequal(stock, ours) == [], name
        assert len(stock) > 3


@pytest.mark.P1
@pytest.mark.parametrize(
    ("on", "world_size", "seeds"),
    [
        ("cpu", 2, range(1, 4)),
        ("software_gpu", 1, range(1)),
        pytest.param("software_gpu", 2, range(2, 8), marks=pytest.mark.thorough),
    ],
)
def test_calls_in_random_order_see_values_bit_identical_to_stock(on: str, world_size: int, seeds: range) -> None:
    on_ranks(world_size, compare_calls, seeds, group=GROUPS[on], timeout_s=900)


def wait_unless_for_states(update: Update, *, states: bool = False, wait: Any = Update.wait) -> None:
    if not states:
        wait(update)


@ranks(1)
def test_each_wait_that_is_removed_is_noticed() -> None:
    reading = states.reads_during_an_update.__wrapped__
    stock = seen(reading, None)
    for block, owner, method, replacement in (
        (CPU, Executor, "publish", mock.Mock()),
        (CPU, Gathers, "_finish_update", mock.Mock()),
        (CPU, Update, "wait", wait_unless_for_states),
        (RESIDENT, Executor, "sync_states_to_host", mock.Mock()),
    ):
        with mock.patch.object(owner, method, replacement):
            assert unequal(stock, seen(reading, block)), method


class OneOfTwoLayers(BehaviourNet):
    alone = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) if self.alone else super().forward(x)


def backward(engine: Any, step: int, factor: float = 1.0) -> None:
    engine.backward(loss_of(engine(inputs(step))) * factor)
    wait_for_speculations(engine)


def after_an_interrupted_step(engine: Any) -> None:
    backward(engine, 0)
    interrupted = mock.patch.object(engine.optimizer, "_optimizer_step", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.module.alone = True
    backward(engine, 2)
    engine.step()


def after_a_boundary_that_was_none(engine: Any) -> None:
    for step, is_last in enumerate((True, False)):
        engine.set_gradient_accumulation_boundary(is_last)
        backward(engine, step)
    engine.set_gradient_accumulation_boundary(True)
    engine.step()


def with_a_learning_rate_in_a_tensor(engine: Any) -> None:
    rate = engine.optimizer.param_groups[0]["lr"] = torch.tensor(1e-2)
    for step in range(3):
        backward(engine, step)
        rate.mul_(0.5)
        engine.step()


def steps_in_order(variant: BehaviourVariant, order: Callable[[Any], None]) -> Seen:
    # Without clipping, which DeepSpeed's default would do, and which would make each speculation void.
    engine = variant.engine(OneOfTwoLayers(2), gradient_clipping=0.0)
    backward(engine, 9)
    engine.step()
    with counted_speculations() as counts:
        order(engine)
    assert variant.block == CPU or counts.void > 0
    yield from ()


@pytest.mark.P1
@ranks(1)
def test_no_order_of_calls_commits_a_step_of_old_gradients_or_of_an_old_learning_rate() -> None:
    """Compare with units that are not eager: stock keeps old gradients."""
    for order in (after_an_interrupted_step, after_a_boundary_that_was_none, with_a_learning_rate_in_a_tensor):
        expected, found = (seen(partial(steps_in_order, order=order), block) for block in (CPU, eager(CPU)))
        assert unequal(expected, found) == [], order


def write_gathered(engine: Any) -> None:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        for param in engine.module.parameters():
            param.data.mul_(0.5)


def offload_and_reload(engine: Any) -> None:
    engine.offload_states()
    engine.reload_states()


def save_and_load(engine: Any) -> None:
    with shared_folder() as folder:
        engine.save_checkpoint(str(folder))
        engine.load_checkpoint(str(folder))


def calls_between_backward_and_step(variant: BehaviourVariant) -> Seen:
    engine = variant.engine(BehaviourNet(), gradient_clipping=0.0)
    yield from train(engine, 1)
    for call in (write_gathered, offload_and_reload, save_and_load):
        with slow_updates(variant), counted_speculations() as counts:
            for step in (1, 2):
                engine.backward(loss_of(engine(inputs(step))))
                if step == 1:
                    wait_for_speculations(engine)
                call(engine)
                yield from states.all_gathered(engine)
                engine.step()
                yield from final_states(engine)
                yield from train(engine, 1, first=8 + step)
        assert variant.block is None or counts.kept + counts.void > 0


@pytest.mark.P1
@ranks(2)
def test_calls_between_backward_and_step_are_bit_identical_to_stock() -> None:
    stock, ours = (seen(calls_between_backward_and_step, block) for block in (None, eager(CPU)))
    assert unequal(stock, ours) == []


STEPS, SKIPPED, CLIPPED = 32, 4, range(5, 10)
"""The number of steps, the step that is skipped, and those that are clipped: more than a quarter of 20 steps."""


def train_with_clipped_steps(block: Block) -> tuple[Record, list[tuple[int, str]], list[int]]:
    torch.manual_seed(5)
    lines: list[tuple[int, str]] = []
    speculated = []
    variant = BehaviourVariant(block)
    engine = variant.engine(BehaviourNet())
    for step in range(STEPS):
        engine.optimizer.clip_grad = 1e-3 if step in CLIPPED else 0.0
        log = mock.patch("deep_opt_states.log.info", lambda line, step=step: lines.append((step, line)))
        with log, counted_speculations() as counts:
            backward(engine, step, float("inf") if step == SKIPPED else 1.0)
            engine.step()
        speculated.append(counts.kept + counts.void)
    record = recorded(engine)
    variant.close()
    return record, lines, speculated


@ranks(2)
def test_updates_in_backward_pause_while_many_steps_are_clipped_or_skipped() -> None:
    stock, *_ = train_with_clipped_steps(None)
    ours, lines, speculated = train_with_clipped_steps(eager(CPU))
    assert_same_bits(stock, ours)
    # The skipped step was the first of them.
    last, again = CLIPPED[-1], SKIPPED + LAST_STEPS
    assert [(step, line.partition(":")[0]) for step, line in lines] == [
        (last, "updates in backward stop"),
        (again, "updates in backward start again"),
    ]
    assert [number > 0 for number in speculated] == [step <= last or step > again for step in range(STEPS)]
