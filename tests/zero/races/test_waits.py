"""Check what forward waits for, in which order units are updated, and that delays change neither bits nor collectives.

The CPU update of a unit is held back until the layer before the first one that needs it has computed. A forward that
waited for more than its own units would therefore never continue.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest

from deep_opt_states.device.kernels.adam import RangeUpdate
from deep_opt_states.runtime.issuer import Issuer
from deep_opt_states.zero.step.gathers import Gathers
from perf_model.schedule.schedule import Schedule
from tests.kernels.intercepted import before_each_update
from tests.ranks import ranks
from tests.tiers import thorough
from tests.zero.parity.case import Case
from tests.zero.parity.cases import TWO_DECAYS
from tests.zero.parity.training import (
    assert_same_bits,
    closing_engine,
    forward,
    gathered,
    parity_inputs,
    run_variant,
    train_on_batch,
)
from tests.zero.races.delayed_ranks import train_with_delays

BLOCK = {"placement": "cpu", "unit_size": 600}
"""All units on the CPU: where the accelerator is the CPU, streamed units are updated when ``step()`` returns."""

CASE = Case(
    name="one sub-group",
    blocks=(BLOCK,),
    sub_group_size=10**9,
    # Nothing is gathered before the module that needs it, and nothing is updated before step() returns.
    zero={"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0},
)

STEPS = 3
"""The number of steps before the recorded one. DeepSpeed records the order of forward in the first ones."""

STUCK_S = 60
"""The seconds after which an update fails that is held back by a forward that waits for it."""


def units_of_layers(optimizer: Any) -> list[list[int]]:
    units = optimizer.plan.workload.units
    found = []
    for layer in optimizer.module.layers:
        ranges = [optimizer.grad_position[optimizer.get_param_id(param)] for param in layer.parameters()]
        assert {sub_group for sub_group, *_ in ranges} == {0}
        found.append(
            sorted({
                unit.index for _, begin, numel in ranges for unit in units
                if any(run.begin < begin + numel and begin < run.end for run in unit.ranges)
            })
        )  # fmt: skip
    return found


def hold_back_updates(engine: Any) -> AbstractContextManager[object]:
    """Let the CPU update of each unit wait until the layer before the first one that needs the unit has computed."""
    units, needed = engine.optimizer._running.memory.units, units_of_layers(engine.optimizer)
    assert len(needed[0]) < len(units)
    computed = [threading.Event() for _ in needed]
    for layer, done in zip(engine.module.layers, computed, strict=True):
        layer.register_forward_hook(lambda *_, done=done: done.set())

    def hold_back(update: RangeUpdate) -> None:
        if threading.current_thread() is threading.main_thread():
            return
        (unit,) = (
            index for index, state in enumerate(units)
            if update.element_range in [part.elements for part in state.parts]
        )  # fmt: skip
        first = min(layer for layer, held in enumerate(needed) if unit in held)
        assert first == 0 or computed[first - 1].wait(STUCK_S), f"forward waits for unit {unit} before layer {first}"

    return before_each_update(hold_back)


@pytest.mark.P2
@ranks(1, thorough(2))
def test_a_modules_forward_waits_only_for_the_units_that_hold_its_parameters() -> None:
    inputs = parity_inputs(CASE, 0, 0)
    with closing_engine(CASE, BLOCK) as engine:
        for number in range(STEPS):
            train_on_batch(engine, CASE, number)
        engine.backward(forward(engine, inputs))
        with hold_back_updates(engine):
            engine.step()
            assert engine.optimizer._update._executor.pending
            forward(engine, inputs)
            engine.optimizer._update.wait()
        # Nothing is in flight, so hooks look for no units.
        with mock.patch.object(Gathers, "_units_of", side_effect=AssertionError):
            forward(engine, inputs)
        assert engine.optimizer._running.executor.failure is None


@ranks(2)
def test_updates_follow_the_order_of_forward_and_stay_bit_identical_to_stock() -> None:
    """Check the orders of units in all schedules that the executor used, with overlap in forward and without."""
    orders = []
    set_schedule = Issuer.set_schedule
    for overlap in (True, False):
        block = {"placement": "stride", "update_stride": 2, "num_slots": 1, "overlap_forward": overlap}
        case = Case(name="ordered", blocks=(block,), groups=TWO_DECAYS, world_size=2, clip=0.3)
        published: list[list[int]] = []

        def recorded(self: Issuer, schedule: Schedule, published: list[list[int]] = published) -> None:
            kinds = ("PUBLISH", "GPU_STEP")
            published.append([action.unit for action in schedule.actions if action.kind.value in kinds])
            set_schedule(self, schedule)

        stock = run_variant(case, None)
        with mock.patch.object(Issuer, "set_schedule", recorded):
            assert_same_bits(stock, run_variant(case, block))
        orders.append(published)
    (by_index, as_used), at_once = orders
    assert sorted(as_used) == sorted(by_index)
    # The second param group's first layers come before the first group's last ones.
    assert as_used != by_index
    # Without overlap no forward waits for the update, so the order is not changed, and no unit is persistent.
    assert by_index[0] == 0
    assert at_once == [[unit - 1 for unit in by_index[1:]]]
    assert gathered(orders) == [orders, orders]


@pytest.mark.P1
@ranks(2, thorough(1), thorough(4), timeout_s=120)
def test_delays_change_neither_the_bits_nor_the_order_of_collectives() -> None:
    train_with_delays([1, 2])
