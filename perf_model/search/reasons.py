"""Explain in one sentence why a plan streams nothing, from the inputs of the planner and from its candidates.

``plan_updates`` returns the plan with the least exposed time within the budgets, but not the reason why this plan does
not stream. These functions look at the same rates, memory and simulation, with one or more units streamed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import TrainingSetup, memory_of
from perf_model.prediction.simulate import Simulator
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.simple_placements import keep_fixed
from perf_model.search.budgets import Budgets
from perf_model.search.starting_points import MAX_SLOTS
from perf_model.search.unit_sizes import UNIT_SIZES
from perf_model.units import DIGITS, GB, gigabytes, seconds

TRIED_STRIDES = (8, 4, 2, 1)
"""Strides to simulate: every n-th unit is streamed. One streamed unit alone is simulated, too."""

SLOTS_IN_A_REMEDY = 2
"""Slots that must fit when a smaller ``unit_size`` is proposed: one is updated while the other is filled."""


def why_nothing_is_streamed(
    plan: UpdatePlan, cost: CostModel, budgets: Budgets, setup: TrainingSetup, *, unavailable: str = ""
) -> str | None:
    """Return the reason, or None if ``plan``, which was found with the other arguments, streams something.

    ``unavailable`` is the reason why the accelerator cannot update anything, if there is one.
    """
    if Placement.STREAMED in plan.placements:
        return None
    if unavailable:
        return f"Nothing is streamed: {unavailable}"
    if set(plan.placements) == {Placement.RESIDENT}:
        return "Nothing is streamed: the states of all units fit into GPU memory, and stay there."
    if not _free(plan):
        return "Nothing is streamed: rules give every unit another placement."
    if Placement.STREAMED not in cost.placements:
        return "Nothing is streamed: the hardware profile has no rate of Adam on the GPU. Profile this machine again."
    return _too_little_memory(plan, budgets, setup) or _slower(plan, cost, budgets, setup)


def _free(plan: UpdatePlan) -> list[int]:
    """Return the indices of the units that the planner places."""
    return [unit.index for unit in plan.workload.units if unit.fixed is None]


def _too_little_memory(plan: UpdatePlan, budgets: Budgets, setup: TrainingSetup) -> str | None:
    """Return the reason if not even the shortest unit, streamed alone, fits in GPU memory; else None."""
    allowed_bytes = budgets.gpu_bytes
    if allowed_bytes is None:
        return None
    numels = [unit.numel for unit in plan.workload.units]
    shortest = min(_free(plan), key=numels.__getitem__)
    streaming = _streaming(plan, [shortest], num_slots=1)
    needed_bytes = memory_of(streaming, setup).gpu_bytes
    if needed_bytes <= allowed_bytes:
        return None
    slot_bytes = numels[shortest] * setup.widths.staged_bytes
    kept = [numel for numel, placement in zip(numels, streaming.placements, strict=True) if _keeps(placement, setup)]
    gradient_bytes = setup.widths.grad * sum(kept)
    remedy = f'Set "gpu_memory_gb" to at least {math.ceil(10 * needed_bytes / GB) / 10:.1f}'
    if size := _smaller_units(allowed_bytes, gradient_bytes if setup.accumulates else 0, numels[shortest], setup):
        remedy += f', or "unit_size" to {size}'
    else:
        remedy += ", or use more ranks, so that each has fewer gradients"
    return (
        f"Nothing is streamed: the budget of {gigabytes(allowed_bytes)} of GPU memory cannot hold a slot of "
        f"{gigabytes(slot_bytes)} in addition to {gigabytes(gradient_bytes)} of gradients. {remedy}."
    )


def _keeps(placement: Placement, setup: TrainingSetup) -> bool:
    """Return whether the gradient of a unit is on the accelerator."""
    return setup.accumulates or placement is not Placement.CPU


def _smaller_units(allowed_bytes: int, gradient_bytes: int, shortest_numel: int, setup: TrainingSetup) -> int | None:
    """Return the largest usual size whose slots fit, if it is smaller than the units are.

    ``gradient_bytes`` are on the accelerator whatever the size. Without accumulation, the gradients of the units in
    slots are there, too.
    """
    each_bytes = setup.widths.staged_bytes + (0 if setup.accumulates else setup.widths.grad)
    most = min(shortest_numel - 1, (allowed_bytes - gradient_bytes) // (SLOTS_IN_A_REMEDY * each_bytes))
    return max((size for size in UNIT_SIZES if size <= most), default=None)


def _slower(plan: UpdatePlan, cost: CostModel, budgets: Budgets, setup: TrainingSetup) -> str:
    """Return the reason with the predicted times of ``plan`` and of the best candidate that streams."""
    simulator = Simulator(cost)

    def update_s(candidate: UpdatePlan) -> float:
        return simulator.run(candidate.schedule, candidate.workload).end_s

    fits = [candidate for candidate in _candidates(plan) if not budgets.missing(memory_of(candidate, setup))]
    best = min(fits, key=update_s)
    streamed = best.placements.count(Placement.STREAMED)
    budget = "" if budgets.gpu_bytes is None else f" within the budget of {gigabytes(budgets.gpu_bytes)} of GPU memory"
    without, with_streaming = (seconds(update_s(candidate), DIGITS) for candidate in (plan, best))
    return (
        f"Nothing is streamed: the update is predicted to take {without} without streaming, and {with_streaming} at "
        f"best with it{budget}, with {streamed} of {len(best.placements)} units streamed."
    )


def _candidates(plan: UpdatePlan) -> Iterator[UpdatePlan]:
    """Yield plans that stream one unit or every n-th unit.

    They are chosen from the free units that ``plan`` updates on the CPU, and then from all free units.
    """
    numels = [unit.numel for unit in plan.workload.units]
    every = _free(plan)
    on_cpu = [index for index in every if plan.placements[index] is Placement.CPU]
    for streamable in filter(None, (on_cpu, every)):
        shortest = min(streamable, key=numels.__getitem__)
        for streamed in ([shortest], *(streamable[stride - 1 :: stride] for stride in TRIED_STRIDES)):
            for num_slots in range(1, min(MAX_SLOTS, len(streamed)) + 1):
                yield _streaming(plan, streamed, num_slots, keeps_residents=streamable is on_cpu)


def _streaming(
    plan: UpdatePlan, streamed: Sequence[int], num_slots: int, *, keeps_residents: bool = False
) -> UpdatePlan:
    """Return a plan like ``plan`` with these units streamed and the other free ones on the CPU."""
    placements = [
        Placement.RESIDENT if keeps_residents and placement is Placement.RESIDENT else Placement.CPU
        for placement in plan.placements
    ]
    for index in streamed:
        placements[index] = Placement.STREAMED
    return UpdatePlan(
        workload=plan.workload, placements=keep_fixed(plan.workload, tuple(placements)), num_slots=num_slots
    )
