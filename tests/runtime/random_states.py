"""Draw random states and gradients, put persistent parameters in a unit of their own, and compare bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from deep_opt_states.device.kernels.adam import AdamStep, AdamTensors
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.failure import UpdateFailed
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Range, Unit, Workload


def random_states(numels: Sequence[int], dtype: torch.dtype) -> list[AdamTensors]:
    generator = torch.Generator().manual_seed(0)
    states = []
    for numel in numels:
        master = torch.randn(numel, generator=generator)
        states.append(
            AdamTensors(
                master=master,
                exp_avg=torch.randn(numel, generator=generator),
                exp_avg_sq=torch.rand(numel, generator=generator),
                grad=torch.empty(numel),
                param=master.to(dtype, copy=True),
            )
        )
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


def gradients(numels: Sequence[int], step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(numel, generator=generator) for numel in numels]


def run_update(executor: Executor, steps: Sequence[AdamStep]) -> None:
    """Run an update, with one entry of ``steps`` per sub-group, and return when every action has finished."""
    if executor.failure is None:
        executor.begin(steps)
        executor.end()
    if executor.failure is not None:
        raise UpdateFailed.because_of(executor.failure)


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Return whether all tensors have the same dtypes and the same bytes, on any device; 0 is not -0."""
    pairs = [(one.cpu().flatten(), other.cpu().flatten()) for one, other in zip(found, expected, strict=True)]
    return all(
        one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs
    )
