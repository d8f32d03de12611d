"""Check that forward waits for the units that hold a module's parameters, and not for their whole sub-group.

The CPU update of a unit is held back until the layer before the first one that needs it has computed. A forward that
waited for more than its own units would therefore never continue.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deep_opt_states.device.cpu import HostStream
from deep_opt_states.device.kernels.adam import RangeUpdate
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.uninterrupted import Uninterrupted
from deep_opt_states.zero.internals.coordinator import Coordinator
from deep_opt_states.zero.step.gathers import Gathers
from tests.kernels.intercepted import before_each_update
from tests.ranks import ranks
from tests.tiers import thorough
from tests.zero.parity.case import Case
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import closing_engine

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


@dataclass
class Waits:
    """The units that are published, in order, and how many of them before each layer computes."""

    published: list[int] = field(default_factory=list)
    before_layer: list[int] = field(default_factory=list)


def units_of_layers(optimizer: Any) -> list[list[int]]:
    """Return the units that hold the parameters of each layer."""
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


@contextmanager
def recorded_waits(engine: Any, *, held_back: bool) -> Iterator[Waits]:
    """Record which units are waited for inside this context, and hold the CPU updates back if ``held_back``."""
    optimizer, layers = engine.optimizer, engine.module.layers
    executor, units = optimizer._running.executor, optimizer._running.memory.units
    needed = units_of_layers(optimizer)
    computed = [threading.Event() for _ in layers]
    waits, publish = Waits(), executor.publish

    def recorded_publish(unit: int) -> None:
        if unit not in waits.published:
            waits.published.append(unit)
        publish(unit)

    def hold_back(update: RangeUpdate) -> None:
        if not held_back or threading.current_thread() is threading.main_thread():
            return
        (unit,) = (
            index for index, state in enumerate(units)
            if update.element_range in [part.elements for part in state.parts]
        )  # fmt: skip
        first = min(layer for layer, held in enumerate(needed) if unit in held)
        assert first == 0 or computed[first - 1].wait(STUCK_S), f"forward waits for unit {unit} before layer {first}"

    handles = []
    for layer, done in zip(layers, computed, strict=True):
        handles.append(layer.register_forward_pre_hook(lambda *_: waits.before_layer.append(len(waits.published))))
        handles.append(layer.register_forward_hook(lambda *_, done=done: done.set()))
    with mock.patch.object(executor, "publish", recorded_publish), before_each_update(hold_back):
        yield waits
    for handle in handles:
        handle.remove()


def waits_of_forward(block: dict[str, Any], *, held_back: bool) -> dict[str, Any]:
    """Train, and return the units that a forward waits for, up to each layer, and those that the layers need."""
    with closing_engine(CASE, block) as engine:
        forward(engine, backward=True)
        for _ in range(STEPS):
            engine.step()
            forward(engine, backward=True)
        with recorded_waits(engine, held_back=held_back) as waits:
            engine.step()
            forward(engine, backward=False)
        return {
            "block": block,
            "units": len(engine.optimizer.plan.workload.units),
            "waited": [sorted(waits.published[:count]) for count in waits.before_layer],
            "needed": units_of_layers(engine.optimizer),
        }


def forward(engine: Any, *, backward: bool) -> None:
    x, target = batch(CASE, dist.get_rank(), 1, torch.bfloat16)
    loss = engine(x, target, None, 1.0)
    if backward:
        engine.backward(loss)


def wait_for_whole_sub_groups(self: Gathers) -> dict[int, tuple[int, ...]]:
    every_unit = tuple(unit.index for unit in self._running.plan.workload.units)
    return dict.fromkeys(self._ranges, every_unit)


ENDED_IN_STEP = (
    {"placement": "cpu", "overlap_forward": False, "unit_size": 600},
    # Where the accelerator is the CPU, streamed units are updated when ``step()`` returns.
    {"placement": "streamed", "unit_size": 600},
)

COUNTED = {
    "lookups": (Gathers, "_units_of"),
    "waits": (Executor, "publish"),
    "limits": (Coordinator, "prefetching_until"),
    "events": (HostStream, "record"),
    "sections": (Uninterrupted, "run"),
}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of ``COUNTED`` inside this context."""
    calls: Counter[str] = Counter()
    with ExitStack() as patches:
        for name, (owner, method) in COUNTED.items():
            original = getattr(owner, method)

            def count(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
                calls[name] += 1
                return original(*args, **kwargs)

            patches.enter_context(mock.patch.object(owner, method, count))
        yield calls


def calls_of(case: Case, block: dict[str, Any]) -> dict[str, Counter[str]]:
    """Return what the hooks do in a forward, and in it and its backward."""
    with closing_engine(case, block) as engine:
        for _ in range(STEPS):
            forward(engine, backward=True)
            engine.step()
        with counted() as in_forward:
            forward(engine, backward=False)
        with counted() as in_both:
            forward(engine, backward=True)
    return {"forward": in_forward, "both": in_both}


@pytest.mark.promise("P2")
@ranks(1, thorough(2))
def test_a_modules_forward_waits_only_for_the_units_that_hold_its_parameters() -> None:
    found = waits_of_forward(BLOCK, held_back=True)
    assert found["units"] >= 4, "one sub-group, several units"
    needed = [sorted(units) for units in accumulate(map(set, found["needed"]), set.union)]
    assert found["waited"] == needed
    assert len(needed[0]) < found["units"]
    with mock.patch.object(Gathers, "_units", property(wait_for_whole_sub_groups)):
        naive = waits_of_forward(BLOCK, held_back=False)
    assert naive["waited"][0] == list(range(naive["units"])), "the rewrite waits for the whole sub-group"


@ranks(1)
def test_the_hooks_of_modules_do_nothing_once_the_update_has_ended() -> None:
    for block in ENDED_IN_STEP:
        found = calls_of(CASE, block)
        assert found["forward"] == {}
        # Before backward, the plan may change. In it, the update is ended, and the next one is prefetched.
        assert found["both"].keys() <= {"sections", "events"}
        assert found["both"]["sections"] <= 3, "none per module or per bucket"
