"""Train a model whose only sub-group has several units, and print which units each layer's forward waits for.

The CPU update of a unit is held back until the layer before the first one that needs it has computed. A forward that
waited for more than its own units would therefore never continue. Every rank prints one answer per block, and one for
a naive rewrite, for which nothing is held back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from deep_opt_states.device.kernels.adam import RangeUpdate
from deep_opt_states.zero.step.gathers import Gathers
from tests.kernels.intercepted import before_each_update
from tests.launch import answer
from tests.zero.parity.case import Case
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import closing_engine
from tests.zero.process_group import process_group

BLOCKS = tuple({"placement": placement, "unit_size": 600, "num_slots": 1} for placement in ("cpu", "streamed"))
CASE = Case(
    name="one sub-group",
    blocks=BLOCKS,
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


if __name__ == "__main__":
    with process_group():
        for block in BLOCKS:
            answer(waits_of_forward(block, held_back=True))
        with mock.patch.object(Gathers, "_units", property(wait_for_whole_sub_groups)):
            answer(waits_of_forward(BLOCKS[0], held_back=False))
