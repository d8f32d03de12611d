"""The schedule between one update and the next: in the order in which forward uses the parameters, with extra slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from deep_opt_states.device.cuda import free_and_retries
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.headroom import Headroom
from deep_opt_states.zero.internals.log import say
from perf_model.schedule.order import as_forward_needs
from perf_model.schedule.plan import UpdatePlan


class AdaptiveSchedule:
    """Of ``plan``, at first as it is.

    ``headroom``: for slots beyond the plan's, None where none can be added. ``first_uses``: the sub-groups in the order
    in which forward needs them, None before that is known; itself None where nothing goes on in forward.
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
        """Once a step, between an update and the next."""
        self._order_as_used()
        self._fit_room()

    def _order_as_used(self) -> None:
        """Sub-groups are numbered by param group and registration; forward may need them in another order."""
        first_uses = self._first_uses() if self._first_uses is not None else None
        if first_uses is None:
            return
        self._first_uses = None
        numbered = self.plan
        every = list(dict.fromkeys([*first_uses, *range(len(numbered.placements))]))
        order = as_forward_needs(numbered.workload, numbered.placements, every)
        self.plan = replace(numbered, order=order)
        if self.plan.schedule != numbered.schedule:
            self._use()
            say(f"updates in the order in which forward uses the parameters from now on: {self.plan}")

    def _fit_room(self) -> None:
        headroom = self._headroom
        if headroom is None:
            return
        held = headroom.slots
        headroom.observe(*free_and_retries())
        if headroom.slots == held:
            return
        try:
            slots = self._use()
        except torch.OutOfMemoryError:
            headroom.refused()
            self._use()
            say("GPU memory is short: no slots beyond the plan's")
        else:
            say(f"{slots} slots from now on, {headroom.slots} beyond the plan's, by the GPU memory that is left free")

    def _use(self) -> int:
        """The slots that the next update goes through; none where nothing is streamed, and then none is added."""
        schedule = self.plan.schedule
        if self._headroom is not None and self._headroom.slots:
            schedule = replace(self.plan, num_slots=schedule.num_slots + self._headroom.slots).schedule
        self._executor.use(schedule)
        return schedule.num_slots
