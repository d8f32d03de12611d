"""Slots beyond the plan's, for states that are prefetched during backward, as the GPU has room for them."""

from __future__ import annotations

from dataclasses import replace

import torch

from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.headroom import Headroom
from deep_opt_states.zero.devices import free_and_retries
from deep_opt_states.zero.log import say
from perf_model.plan import UpdatePlan


class ExtraSlots:
    """Beyond those of ``plan``; ``headroom``: None where none can be added."""

    def __init__(self, plan: UpdatePlan, executor: Executor, headroom: Headroom | None) -> None:
        self.plan = plan
        self._executor = executor
        self._headroom = headroom

    def adapt(self) -> None:
        """Once a step, between an update and the next."""
        headroom = self._headroom
        if headroom is None:
            return
        held = headroom.slots
        headroom.observe(*free_and_retries())
        if headroom.slots == held:
            return
        slots = self.plan.schedule.num_slots + headroom.slots
        try:
            self._executor.use(replace(self.plan, num_slots=slots).schedule)
        except torch.OutOfMemoryError:
            headroom.refused()
            self._executor.use(self.plan.schedule)
            say("GPU memory is short: no slots beyond the plan's")
        else:
            say(f"{slots} slots from now on, {headroom.slots} beyond the plan's, by the GPU memory that is left free")
