"""Make the states of units with random contents, and update them through an executor or serially."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels import adam as kernels
from deep_opt_states.device.kernels.adam import FP32_STATES, AdamStep, AdamTensors, ElementRange
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.failure import UpdateFailed
from deep_opt_states.runtime.state import Resident, Shadow, Slot, UnitPart, UnitState
from perf_model.schedule.happens_before import CHAINS, EAGER_CHAIN
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.workload import Range, Unit, Workload

NAMES = ("master", "exp_avg", "exp_avg_sq", "param")


def make_states(numels: Sequence[int], dtype: torch.dtype, seed: int = 0) -> list[UnitState]:
    """Return random states, each unit a sub-group of its own. Until ``place`` is called, the CPU updates all of them.

    All gradients are fp32.
    """
    generator = torch.Generator().manual_seed(seed)
    states = []
    for index, numel in enumerate(numels):
        master = torch.randn(numel, generator=generator)
        part = UnitPart(
            sub_group=index,
            elements=ElementRange.whole(numel),
            offset=0,
            master=master,
            exp_avg=torch.randn(numel, generator=generator),
            exp_avg_sq=torch.rand(numel, generator=generator),
            grad=torch.empty(numel),
            param=master.to(dtype).clone(),
            rounded=master if dtype == torch.float32 else torch.empty(numel, dtype=dtype),
        )
        states.append(UnitState(placement=Placement.CPU, parts=[part]))
    return states


def with_persistent(plan: UpdatePlan, persistent: Sequence[Sequence[tuple[int, int]]]) -> UpdatePlan:
    """Return ``plan`` with the ``persistent`` ranges [begin, end) of each sub-group in a persistent unit, if any."""
    ranges = [Range(index, begin, end - begin) for index, runs in enumerate(persistent) for begin, end in runs]
    ranges = [run for run in ranges if run.numel > 0]
    if not ranges:
        return plan
    units = [Unit(0, tuple(ranges), fixed=Placement.CPU, is_persistent=True)]
    placements, moved = [Placement.CPU], {}
    for unit, placement in zip(plan.workload.units, plan.placements, strict=True):
        if rest := tuple(part for run in unit.ranges for part in _without(run, persistent[run.sub_group])):
            moved[unit.index] = len(units)
            units.append(Unit(len(units), rest))
            placements.append(placement)
    order = None if plan.order is None else (0, *(moved[index] for index in plan.order if index in moved))
    return replace(plan, workload=Workload(tuple(units)), placements=tuple(placements), order=order)


def _without(run: Range, taken: Sequence[tuple[int, int]]) -> Iterator[Range]:
    """Yield the elements of ``run`` that are not in ``taken``, ranges [begin, end) in order."""
    begin = run.begin
    for first, end in (*taken, (run.end, run.end)):
        if begin < min(first, run.end):
            yield Range(run.sub_group, begin, min(first, run.end) - begin)
        begin = max(begin, end)


def tensors_of(states: Sequence[UnitState], names: Sequence[str] = ()) -> list[torch.Tensor]:
    """Return the tensors of ``states``, by default those that an update writes."""
    return [getattr(part, name) for state in states for part in state.parts for name in names or NAMES]


def place(states: Sequence[UnitState], schedule: Schedule, device: Device[Any]) -> None:
    """Set the placements that ``schedule`` executes, and reserve memory on ``device`` for resident states.

    The schedule need not be a safe one.
    """
    placements = {frozenset(chain): placement for placement, chain in CHAINS.items()}
    placements[frozenset(EAGER_CHAIN)] = Placement.CPU
    for index, state in enumerate(states):
        kinds = frozenset(action.kind for action in schedule.actions if action.unit == index)
        state.placement = placements[kinds]
        is_resident = state.placement is Placement.RESIDENT
        state.resident = Resident(Slot.reserve(device, state.length, FP32_STATES)) if is_resident else None
        state.shadow = shadow_of(state, device) if kinds == frozenset(EAGER_CHAIN) else None


def shadow_of(state: UnitState, device: Device[Any]) -> Shadow:
    """Return memory for the second version of the states, and let the unit's steps round to memory of their own."""
    for part in state.parts:
        if part.rounded is part.param or part.rounded is part.master:
            part.rounded = device.empty_host(part.elements.numel, part.param.dtype)
    numels = [part.elements.numel for part in state.parts]
    return Shadow(
        [kernels.UpdatedStates(*(device.empty_host(numel, torch.float32) for _ in range(3))) for numel in numels]
    )


def gradients(numels: Sequence[int], step: int) -> list[torch.Tensor]:
    """Return random fp32 gradients, the same for the same step."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(numel, generator=generator) for numel in numels]


def fill_gradients(states: Sequence[UnitState], step: int) -> None:
    for state, gradient in zip(states, gradients([state.length for state in states], step), strict=True):
        state.parts[0].grad.copy_(gradient)


def update_serially(states: Sequence[UnitState], adam: kernels.AdamKernel, steps: Sequence[AdamStep]) -> None:
    """Update one unit after another in host memory, each a sub-group of its own, as stock DeepSpeed does.

    This is the reference.
    """
    adam.begin_step(steps)
    for index, state in enumerate(states):
        adam.update(index, AdamTensors(**{name: getattr(state.parts[0], name) for name in (*NAMES, "grad")}))


def run_update(executor: Executor, steps: Sequence[AdamStep]) -> None:
    """Run an update, with one entry of ``steps`` per sub-group, and return when every action has finished.

    Raise ``UpdateFailed``, with its cause, if this or an earlier update has failed.
    """
    if executor.failure is None:
        executor.begin(steps)
        executor.end()
    if executor.failure is not None:
        raise UpdateFailed.because_of(executor.failure)


def assert_equal(found: Sequence[UnitState], expected: Sequence[UnitState]) -> None:
    for name in NAMES:
        tensors = zip(tensors_of(found, [name]), tensors_of(expected, [name]), strict=True)
        for index, (ours, reference) in enumerate(tensors):
            assert torch.equal(ours, reference), f"{name} of part {index}"


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Return whether all tensors are equal, bit for bit, on any device; NaN equals nothing."""
    return all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(found, expected, strict=True))
