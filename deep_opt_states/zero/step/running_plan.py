"""Run a plan, and replace it by another one between two steps. The bits do not depend on when units move."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from deep_opt_states import log
from deep_opt_states.device.slab import HostMemoryError
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.state import UnitState
from deep_opt_states.runtime.state_memory import StateMemory
from deep_opt_states.waiting import waiting
from deep_opt_states.zero.internals.compat import Parameter
from deep_opt_states.zero.step.exposure import Exposure
from deep_opt_states.zero.step.gradient_buffers import GradientBuffer
from deep_opt_states.zero.step.gradients import Gradients
from deep_opt_states.zero.step.measured_windows import MeasuredWindows
from perf_model.schedule.lowering import forward_order
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, place_all

GradientBuffers = Callable[[UpdatePlan, Sequence[UnitState], bool], list[GradientBuffer]]


@dataclass(kw_only=True)
class RunningPlan:
    """The plan of one engine, and the parts of it that depend on the plan.

    No method is a collective. No update is in flight when one is called, and no gradient is being reduced.

    If ``is_evicted``, training uses the accelerator memory of the plan on this rank, and the CPU updates every unit.
    ``plan`` stays the same on every rank: it decides which collectives forward calls. ``eager`` holds the eager units
    of this rank, none if its host has no memory for them, and ``uses`` the names of the parameters in the order of
    forward, once per use; None while that is unknown, and where no update overlaps with forward.
    """

    plan: UpdatePlan
    eager: frozenset[int]
    memory: StateMemory
    executor: Executor
    gradients: Gradients
    exposure: Exposure
    windows: MeasuredWindows
    gradient_buffers: GradientBuffers
    is_evicted: bool = False
    uses: tuple[str, ...] | None = None

    def evict(self) -> None:
        """Free all accelerator memory of the plan until ``restore``. A window may be open."""
        if self.is_evicted or not self.holds_memory:
            return
        self.gradients.copy_open_sums_to_host()
        self.adopt(self.plan)

    def adopt(self, plan: UpdatePlan) -> None:
        """Run ``plan``, evicted until ``restore``, from the next update on. Open sums are in host memory."""
        self.executor.sync_states_to_host()
        self.is_evicted = True
        self._set(plan)

    def restore(self) -> bool:
        """Reserve the accelerator memory of the plan, while no window is open, or stay evicted and return False."""
        # The units are built anew, without the shadows that may be current.
        self.executor.sync_states_to_host()
        self.is_evicted = False
        with suppress(torch.OutOfMemoryError):
            self._set(self.plan)
            return True
        # After the exception: its traceback refers to the memory that was reserved so far.
        self.adopt(self.plan)
        return False

    def narrow_moments(self) -> None:
        """Keep moments in the dtype of the masters from now on, without their values. A window may be open."""
        self.executor.sync_states_to_host()
        self.gradients.copy_open_sums_to_host()
        self.memory.narrow_moments()
        was_evicted = self.is_evicted
        self.adopt(self.plan)
        if not was_evicted and not self.restore():
            log.warn_this_rank("the plan's accelerator memory could not be reserved again: the CPU updates all units")
        self.gradients.copy_open_sums_from_host()

    def order_by(self, first_uses: Sequence[int]) -> None:
        """Update the units in the order of ``first_uses`` in forward, the same on every rank, between two updates."""
        plan, units = self.plan, self.memory.units
        every_unit = list(dict.fromkeys([*first_uses, *range(len(units))]))
        ordered = replace(plan, order=forward_order(plan.workload, plan.placements, every_unit))
        if ordered.schedule != plan.schedule:
            self.executor.load_plan(replace(ordered, eager=self.eager).schedule, units)
            self.plan = ordered
            log.info(f"updates in the order in which forward uses the parameters from now on: {ordered}")

    def _set(self, plan: UpdatePlan) -> None:
        """Run ``plan``, without accelerator memory if evicted."""
        # After an out-of-memory error, the caller sets another plan. After any other, the states are inconsistent.
        here = replace(plan, placements=place_all(plan.workload, Placement.CPU)) if self.is_evicted else plan
        try:
            # First, so that the new ones may use their memory.
            self.gradients.free_device_accumulators()
            here, units = reserve(here, self.memory)
            self.executor.load_plan(here.schedule, units)
            self.gradients.set_buffers(self.gradient_buffers(here, units, self.is_evicted))
        except torch.OutOfMemoryError:
            raise
        except BaseException as error:
            # Some of these parts have the new plan, and others the old one: no update may run.
            self.executor.fail(error)
            raise
        self.plan, self.eager = plan, here.eager

    def units_of(self, params: Iterable[Parameter]) -> dict[int, list[int]]:
        """Return the units that hold a part of each of ``params``, by ``ds_id``. They change with the plan."""
        units = [unit.index for unit in self.plan.workload.units for _ in unit.ranges]
        return {param.ds_id: sorted({units[part] for part in self.gradients.parts_of(param)}) for param in params}

    @property
    def holds_memory(self) -> bool:
        return any(unit.is_on_accelerator for unit in self.memory.units) or self.gradients.have_device_accumulators


def reserve(plan: UpdatePlan, memory: StateMemory) -> tuple[UpdatePlan, list[UnitState]]:
    """Reserve the memory of ``plan``, and return this rank's part of it: without eager units if they do not fit."""
    # Updates in backward are no collective, so ranks may differ.
    try:
        with waiting(lambda: f"reserving the memory of a plan with {plan.eager_numel:,} eager parameters"):
            memory.set_plan(plan)
    except HostMemoryError as refused:
        log.warn_this_rank(f"updates do not start in backward on this rank. {refused}")
        plan = replace(plan, eager=frozenset())
        memory.set_plan(plan)
    return plan, memory.units
