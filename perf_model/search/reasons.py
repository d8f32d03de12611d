"""Explain in one sentence why a plan streams nothing, from the inputs of the planner and from its candidates.

``plan_updates`` returns the plan with the least exposed time within the budgets, but not the reason why this plan does
not stream. These functions look at the same rates, memory and simulation, with one or more sub-groups streamed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import gradients_on_accelerator, memory_of
from perf_model.prediction.simulate import Simulator
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.schedule import STAGED_BYTES_PER_PARAM
from perf_model.search.budgets import Budgets
from perf_model.search.planner import SUB_GROUP_SIZES
from perf_model.search.starting_points import MAX_SLOTS
from perf_model.units import GB, gigabytes, seconds

TRIED_STRIDES = (8, 4, 2, 1)
"""Strides to simulate: every n-th sub-group is streamed. One streamed sub-group alone is simulated, too."""

SLOTS_IN_A_REMEDY = 2
"""Slots that must fit when a smaller ``sub_group_size`` is proposed: one is updated while the other is filled."""


def why_nothing_is_streamed(
    plan: UpdatePlan,
    cost: CostModel,
    budgets: Budgets,
    param_bytes: int,
    *,
    extra_gradient_bytes: int = 0,
    unavailable: str = "",
) -> str | None:
    """Return the reason, or None if ``plan``, which was found with the other arguments, streams something.

    ``budgets`` are those of the user. They include ``extra_gradient_bytes``, the bytes that gradients take in addition
    to gradients in the model's dtype. ``unavailable`` is the reason why the accelerator cannot update anything, if
    there is one.
    """
    if Placement.STREAMED in plan.placements:
        return None
    if unavailable:
        return f"Nothing is streamed: {unavailable}"
    if set(plan.placements) == {Placement.RESIDENT}:
        return "Nothing is streamed: the states of all sub-groups fit into GPU memory, and stay there."
    if Placement.STREAMED not in cost.placements:
        return "Nothing is streamed: the hardware profile has no rate of Adam on the GPU. Profile this machine again."
    return _too_little_memory(plan, budgets, param_bytes, extra_gradient_bytes) or _slower(
        plan, cost, budgets, param_bytes, extra_gradient_bytes
    )


def _too_little_memory(plan: UpdatePlan, budgets: Budgets, param_bytes: int, extra_gradient_bytes: int) -> str | None:
    """Return the reason if not even the shortest sub-group, streamed alone, fits in GPU memory; else None."""
    allowed_bytes = budgets.gpu_bytes
    if allowed_bytes is None:
        return None
    numels = [sub_group.numel for sub_group in plan.workload.sub_groups]
    shortest = min(range(len(numels)), key=numels.__getitem__)
    needed_bytes = extra_gradient_bytes + memory_of(_streaming(plan, [shortest], num_slots=1), param_bytes).gpu_bytes
    if needed_bytes <= allowed_bytes:
        return None
    gradient_bytes = extra_gradient_bytes + sum(
        reservation.count * reservation.each_bytes for reservation in gradients_on_accelerator(numels, param_bytes)
    )
    remedy = f'Set "gpu_memory_gb" to at least {math.ceil(10 * needed_bytes / GB) / 10:.1f}'
    if size := _smaller_sub_groups(allowed_bytes - gradient_bytes, numels[shortest]):
        remedy += f', or "sub_group_size" to {size}'
    else:
        remedy += ", or use more ranks, so that each has fewer gradients"
    return (
        f"Nothing is streamed: the budget of {gigabytes(allowed_bytes)} of GPU memory cannot hold a slot of "
        f"{gigabytes(numels[shortest] * STAGED_BYTES_PER_PARAM)} in addition to {gigabytes(gradient_bytes)} of "
        f"gradients. {remedy}."
    )


def _smaller_sub_groups(free_bytes: int, shortest_numel: int) -> int | None:
    """Return the largest usual size whose slots fit in ``free_bytes``, if it is smaller than the sub-groups are."""
    most = min(shortest_numel - 1, free_bytes // (SLOTS_IN_A_REMEDY * STAGED_BYTES_PER_PARAM))
    return max((size for size in SUB_GROUP_SIZES if size <= most), default=None)


def _slower(plan: UpdatePlan, cost: CostModel, budgets: Budgets, param_bytes: int, extra_gradient_bytes: int) -> str:
    """Return the reason with the predicted times of ``plan`` and of the best candidate that streams."""
    simulator = Simulator(cost)

    def update_s(candidate: UpdatePlan) -> float:
        return simulator.run(candidate.schedule, candidate.workload).end_s

    fits = [
        candidate
        for candidate in _candidates(plan)
        if budgets.gpu_bytes is None
        or memory_of(candidate, param_bytes).gpu_bytes + extra_gradient_bytes <= budgets.gpu_bytes
    ]
    best = min(fits, key=update_s)
    streamed = best.placements.count(Placement.STREAMED)
    budget = "" if budgets.gpu_bytes is None else f" within the budget of {gigabytes(budgets.gpu_bytes)} of GPU memory"
    return (
        f"Nothing is streamed: the update is predicted to take {seconds(update_s(plan))} without streaming, and "
        f"{seconds(update_s(best))} at best with it{budget}, with {streamed} of {len(best.placements)} sub-groups "
        f"streamed."
    )


def _candidates(plan: UpdatePlan) -> Iterator[UpdatePlan]:
    """Yield plans that stream one sub-group or every n-th sub-group.

    They are chosen from the sub-groups that ``plan`` updates on the CPU, and then from all sub-groups.
    """
    numels = [sub_group.numel for sub_group in plan.workload.sub_groups]
    every = range(len(numels))
    on_cpu = [index for index in every if plan.placements[index] is Placement.CPU]
    for streamable in (on_cpu, every):
        shortest = min(streamable, key=numels.__getitem__)
        for streamed in ([shortest], *(streamable[stride - 1 :: stride] for stride in TRIED_STRIDES)):
            for num_slots in range(1, min(MAX_SLOTS, len(streamed)) + 1):
                yield _streaming(plan, streamed, num_slots, keeps_residents=streamable is on_cpu)


def _streaming(
    plan: UpdatePlan, streamed: Sequence[int], num_slots: int, *, keeps_residents: bool = False
) -> UpdatePlan:
    """Return a plan like ``plan`` with these sub-groups streamed and the others on the CPU."""
    placements = [
        Placement.RESIDENT if keeps_residents and placement is Placement.RESIDENT else Placement.CPU
        for placement in plan.placements
    ]
    for index in streamed:
        placements[index] = Placement.STREAMED
    return UpdatePlan(workload=plan.workload, placements=tuple(placements), num_slots=num_slots)
