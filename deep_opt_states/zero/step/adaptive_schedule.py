"""Adapt the schedule between updates: to the order in which forward uses the parameters, and to free GPU memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from deep_opt_states.device.cuda import free_and_retries
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.headroom import Headroom
from deep_opt_states.zero.internals.log import log_rank_0
from perf_model.schedule.order import forward_order
from perf_model.schedule.plan import UpdatePlan


class AdaptiveSchedule:
    """The schedule that ``executor`` runs: at first that of ``plan``, later with another order or more slots.

    ``headroom`` decides about slots beyond the plan's; None if none may be added. ``first_uses`` returns the sub-groups
    in the order in which forward needs them, or None while that is unknown; it is itself None if no update is deferred
    into forward.
    """

    def __init__(
        self,
        plan: UpdatePlan,
        executor: Executor,
        headroom: Headroom | None,
        first_uses: Callable[[], list[int] | None] | None,
    ) -> None:
        self.plan = plan
        self._executor = executor
        self._headroom = headroom
        self._first_uses = first_uses

    def adapt(self) -> None:
        """Choose the schedule of the next update. Call this once per step, while no update is in flight."""
        self._adapt_order()
        self._adapt_slots()

    def _adapt_order(self) -> None:
        """Order the updates as forward needs them, once that is known.

        Sub-groups are numbered by param group and registration; forward may use them in another order.
        """
        first_uses = self._first_uses() if self._first_uses is not None else None
        if first_uses is None:
            return
        self._first_uses = None
        numbered = self.plan
        all_sub_groups = list(dict.fromkeys([*first_uses, *range(len(numbered.placements))]))
        order = forward_order(numbered.workload, numbered.placements, all_sub_groups)
        self.plan = replace(numbered, order=order)
        if self.plan.schedule != numbered.schedule:
            self._apply()
            log_rank_0(f"updates in the order in which forward uses the parameters from now on: {self.plan}")

    def _adapt_slots(self) -> None:
        """Add slots if GPU memory has stayed free, or give them back if it is short."""
        headroom = self._headroom
        if headroom is None:
            return
        held = headroom.slots
        headroom.observe(*free_and_retries())
        if headroom.slots == held:
            return
        try:
            slots = self._apply()
        except torch.OutOfMemoryError:
            headroom.add_no_more()
            self._apply()
            log_rank_0("GPU memory is short: no slots beyond the plan's")
        else:
            log_rank_0(f"{slots} slots from now on, {headroom.slots} beyond the plan's, sized by the free GPU memory")

    def _apply(self) -> int:
        """Give the executor the current schedule and return its number of slots.

        A plan that streams nothing has no slots, and none are added to it.
        """
        schedule = self.plan.schedule
        if self._headroom is not None and self._headroom.slots:
            schedule = replace(self.plan, num_slots=schedule.num_slots + self._headroom.slots).schedule
        self._executor.set_schedule(schedule)
        return schedule.num_slots
