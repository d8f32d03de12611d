"""Run a plan, and replace it by another one between two steps.

A unit moves when its placement changes, or when the new plan cuts the sub-group elsewhere. It moves through its place
in host memory: resident states are written back to it, and the states of new residents are loaded from it before the
next update. The bits do not depend on when units move, nor on where they are updated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.exposure import Exposure
from deep_opt_states.runtime.state import Split, UnitState
from deep_opt_states.runtime.state_memory import StateMemory
from deep_opt_states.zero.internals.agreement import gather_values, raise_together
from deep_opt_states.zero.step.gradient_buffers import GradientBuffer
from deep_opt_states.zero.step.gradients import Gradients
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Unit

GradientBuffers = Callable[[UpdatePlan, Sequence[UnitState], bool], list[GradientBuffer]]


@dataclass(kw_only=True)
class RunningPlan:
    """The plan of one engine, and the parts of it that depend on the plan.

    ``early_ranges`` has the ranges of each sub-group that are updated before ``step()`` returns. ``gradient_buffers``
    returns where the gradients of the units of a plan are kept, given whether their memory is evicted.

    ``is_evicted``: on this rank, all memory that the plan needs on the accelerator is given back to training. The
    schedule stays the same on every rank, but its actions on streamed and resident units do nothing here: the CPU
    updates these units before ``step()`` returns.

    ``uses`` has the names of the parameters in the order in which forward uses them, each as often as it does. It is
    None while that is unknown, and where no update overlaps with forward.
    """

    plan: UpdatePlan
    memory: StateMemory
    executor: Executor
    gradients: Gradients
    exposure: Exposure
    early_ranges: Sequence[list[tuple[int, int]]]
    gradient_buffers: GradientBuffers
    is_evicted: bool = False
    uses: tuple[str, ...] | None = None

    def evict(self) -> None:
        """Give all accelerator memory of the plan back to training, until ``restore``. This is no collective.

        The caller calls this while no update is in flight, and no gradient is being reduced. A window may be open. If
        the plan needs no memory there, nothing changes.
        """
        if self.is_evicted or not self.holds_memory:
            return
        self.executor.write_back()
        self.gradients.copy_open_sums_to_host()
        self.is_evicted = True
        self._set(self.plan)

    def restore(self) -> bool:
        """Reserve the memory that ``evict`` has given back, and return whether there is enough.

        This is no collective. No update is in flight and no window is open.
        """
        self.is_evicted = False
        self._set_or_evict(self.plan)
        return not self.is_evicted

    def adopt(self, plan: UpdatePlan) -> bool:
        """Run ``plan``, the same on every rank, from the next update on, and return whether memory allows it.

        This is a collective over all ranks. Every rank calls this while no update is in flight and no gradient of the
        next window exists. If memory is short on any rank, all ranks run ``plan`` without the units that would need
        more memory on the accelerator: the CPU updates these. A rank that is evicted remains so with the new plan.
        """
        without_new = _without_new_memory(plan, self.plan)

        def try_here() -> bool:
            # First give memory back, so that what is taken next may use it.
            kept = {(unit.sub_group, unit.begin, unit.end) for unit in _residents(without_new)}
            self.executor.write_back(
                [
                    unit
                    for unit in self.memory.units
                    if (unit.sub_group, unit.elements.begin, unit.elements.end) not in kept
                ]
            )
            self._set_or_evict(without_new)
            return self._try(plan)

        # Page-locked memory may be short, too. That is an error, which every rank must raise.
        fits = raise_together(try_here)
        if all(gather_values(fits)):
            return True
        if fits:
            self._set_or_evict(without_new)
        return False

    def _try(self, plan: UpdatePlan) -> bool:
        before = self.plan
        try:
            self._set(plan)
            return True
        except torch.OutOfMemoryError:
            pass
        # After the exception: its traceback refers to the memory that was reserved so far.
        self._set_or_evict(before)
        return False

    def _set_or_evict(self, plan: UpdatePlan) -> None:
        """Run ``plan``, with its memory if there is enough."""
        try:
            self._set(plan)
        except torch.OutOfMemoryError:
            self.executor.write_back()
            self.is_evicted = True
            self._set(plan)

    def _set(self, plan: UpdatePlan) -> None:
        """Run ``plan``. If evicted, this reserves nothing on the accelerator; otherwise that may fail.

        After an out-of-memory error, the caller sets a plan for which there is enough memory. After any other error,
        the states are inconsistent until a checkpoint is loaded.
        """
        try:
            # First, so that the new ones may use their memory.
            self.gradients.free_device_accumulators()
            self.memory.set_plan(plan, is_evicted=self.is_evicted)
            units = self.memory.units
            self.executor.set_units(plan.schedule, units, splits_of(units, self.early_ranges))
            self.gradients.set_buffers(self.gradient_buffers(plan, units, self.is_evicted))
            if plan is not self.plan:
                self.exposure.reserve(max_intervals(plan))
        except torch.OutOfMemoryError:
            raise
        except BaseException as error:
            # Some of these parts have the new plan, and others the old one: no update may run.
            self.executor.fail(error)
            raise
        self.plan = plan

    @property
    def holds_memory(self) -> bool:
        """Return whether the plan has memory on the accelerator now."""
        return any(unit.is_on_accelerator for unit in self.memory.units) or self.gradients.have_device_accumulators


def splits_of(units: Sequence[UnitState], early_ranges: Sequence[list[tuple[int, int]]]) -> list[Split]:
    """Return the split of each unit by the early ranges of its sub-group."""
    return [Split.create(unit.elements, early_ranges[unit.sub_group]) for unit in units]


def max_intervals(plan: UpdatePlan) -> int:
    """Return how many waits for one update with ``plan`` are measured at most.

    There is one at the step, one before backward, and one for each action that is issued in between. Each unit is
    waited for by the stream that gathers it ahead, by the computing stream for that stream, and by the computing stream
    itself.
    """
    return 2 + len(plan.schedule.actions) + 3 * len(plan.placements)


def _without_new_memory(plan: UpdatePlan, before: UpdatePlan) -> UpdatePlan:
    """Return ``plan`` with only those residents that are resident before, too. The CPU updates all other units."""
    known = {(unit.sub_group, unit.begin, unit.end) for unit in _residents(before)}
    kept = {unit.index for unit in _residents(plan) if (unit.sub_group, unit.begin, unit.end) in known}
    placements = tuple(Placement.RESIDENT if unit.index in kept else Placement.CPU for unit in plan.workload.units)
    return replace(plan, placements=placements)


def _residents(plan: UpdatePlan) -> list[Unit]:
    placed = zip(plan.workload.units, plan.placements, strict=True)
    return [unit for unit, placement in placed if placement is Placement.RESIDENT]
