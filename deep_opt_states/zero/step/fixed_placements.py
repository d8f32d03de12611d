"""Adapt a plan whose placements the config gives: to forward's order, and to the GPU memory that is free for slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from deep_opt_states.runtime.gpu_budget import GpuBudget
from deep_opt_states.zero.internals.log import log_rank_0, log_this_rank
from deep_opt_states.zero.step.held_memory import HeldMemory
from deep_opt_states.zero.step.running_plan import RunningPlan
from perf_model.prediction.memory import resident_bytes_of
from perf_model.prediction.timeline import PhaseSpan, Timeline
from perf_model.schedule.order import forward_order
from perf_model.schedule.placement import Placement
from perf_model.units import gigabytes


@dataclass(frozen=True, kw_only=True)
class FirstUses:
    """The order in which forward uses parameters and units; each function returns None while that is unknown.

    ``names`` has a parameter as often as forward uses it, and ``units`` has each unit once.
    """

    names: Callable[[], Sequence[str] | None]
    units: Callable[[], Sequence[int] | None]


def learn_uses(running: RunningPlan, first_uses: FirstUses | None) -> bool:
    """Set ``running.uses`` once the order of forward is known, and return whether this call has set it.

    Predictions of the updates depend on it, although the plan may not.
    """
    names = None if first_uses is None or running.uses is not None else first_uses.names()
    if names is None:
        return False
    running.uses = tuple(names)
    return True


class OrderAdaptation:
    """The adaptation of a plan that the config gives: units are updated in the order in which forward uses them.

    ``first_uses`` is None if no update is deferred into forward.
    """

    def __init__(self, running: RunningPlan, first_uses: FirstUses | None) -> None:
        self._running = running
        self._first_uses = first_uses

    @property
    def memory_is_short(self) -> bool:
        """Return False: the placements of the config are kept in any case."""
        return False

    def measure(self, step: int, phases: Sequence[PhaseSpan], timeline: Callable[[], Timeline]) -> None:
        """Do nothing: the plan does not depend on measurements."""

    def observe_memory(self, update: int) -> None:
        """Do nothing: the plan does not depend on free memory."""

    def give_memory_back(self, reason: str) -> None:
        """Do nothing: the placements of the config are kept."""

    def adapt(self, *, memory_is_short_anywhere: bool) -> bool:
        """Order the updates as forward needs them, once that is known. Return whether the order is newly known.

        Units are numbered by param group and registration; forward may use them in another order.
        """
        first_uses = None if self._first_uses is None else self._first_uses.units()
        if first_uses is None:
            return False
        learn_uses(self._running, self._first_uses)
        self._first_uses = None
        numbered = self._running.plan
        every_unit = list(dict.fromkeys([*first_uses, *range(len(numbered.placements))]))
        ordered = replace(numbered, order=forward_order(numbered.workload, numbered.placements, every_unit))
        if ordered.schedule == numbered.schedule:
            return True
        self._running.executor.set_schedule(ordered.schedule)
        self._running.plan = ordered
        log_rank_0(f"updates in the order in which forward uses the parameters from now on: {ordered}")
        return True


class SlotAdaptation(OrderAdaptation):
    """The adaptation of a plan for which the config gives placements, but no number of slots.

    Training begins with the number of the plan. After the first steps each rank adds as many slots as its ``budget``
    allows, up to one per streamed unit, and frees some when memory becomes short. Ranks may have different numbers: the
    order in which collectives are called does not depend on them.

    Before a forward that may need more memory than any before, or in one that takes more, all added slots give their
    memory back. They are added again when the peak of that forward and its backward is known.
    """

    def __init__(self, running: RunningPlan, first_uses: FirstUses | None, budget: GpuBudget) -> None:
        super().__init__(running, first_uses)
        self._fewest = running.plan.schedule.num_slots
        self._most = max(self._fewest, running.plan.placements.count(Placement.STREAMED))
        self._slot_bytes = resident_bytes_of(running.plan.schedule.slot_numel)
        self._gave_back = False
        self._reported = self._fewest
        """The number of slots when ``adapt`` returned last whether the plan has changed."""
        self.memory = HeldMemory(budget, 0, lambda: self._gave_back, lambda: self._num_slots > self._fewest)

    @property
    def _num_slots(self) -> int:
        return self._running.plan.schedule.num_slots

    def observe_memory(self, update: int) -> None:
        """Update the budget from the peak of memory use so far. Call this after backward, before the update."""
        self.memory.observe()

    def adapt(self, *, memory_is_short_anywhere: bool) -> bool:
        """Order the updates as forward needs them, and set the number of slots. Return whether anything has changed."""
        changed = super().adapt(memory_is_short_anywhere=memory_is_short_anywhere)
        if not self.memory.need_is_known:
            return changed
        before = self._num_slots
        number = min(self._most, self._fewest + max(0, self.memory.budget.bytes) // self._slot_bytes)
        if number != before:
            with self.memory.changing():
                self._set_slots(number)
        self._gave_back = False
        self.memory.bytes = (self._num_slots - self._fewest) * self._slot_bytes
        if self._num_slots != before:
            fits = "they fit into the GPU memory that is free at the peak"
            why = fits if self._num_slots > before else "memory is short"
            log_this_rank(
                f"{self._num_slots} staging slots instead of {before}, of which "
                f"{self._num_slots - self._fewest} with {gigabytes(self.memory.bytes)} were added: {why}"
            )
        reported, self._reported = self._reported, self._num_slots
        return changed or self._num_slots != reported

    def give_memory_back(self, reason: str) -> None:
        """Give the memory of all added slots to training. No update is in flight on this rank."""
        if self._num_slots > self._fewest:
            # Retries from now on happen while nothing is held.
            self.memory.count_retries()
            with self.memory.changing():
                self._set_slots(self._fewest)
            self._gave_back = True
            log_this_rank(
                f"{self._fewest} staging slots until the memory need is known: {gigabytes(self.memory.bytes)} of GPU "
                f"memory are given back {reason}"
            )
        self.memory.gave_back()

    def _set_slots(self, number: int) -> None:
        """Run with ``number`` slots from the next update on, or with fewer of the added ones if memory is short."""
        plan = replace(self._running.plan, num_slots=number)
        try:
            self._running.executor.set_schedule(plan.schedule)
            self._running.plan = plan
            return
        except torch.OutOfMemoryError:
            pass
        # After the exception: its traceback refers to the memory that was reserved so far.
        added = (number - self._fewest) // 2
        self.memory.budget.limit(added * self._slot_bytes)
        self._set_slots(self._fewest + added)
