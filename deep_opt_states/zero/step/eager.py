"""Start the updates of eager units in backward, for the step that is likely to follow.

A step is nearly always neither clipped nor skipped. So a unit whose gradients are complete is updated for that case,
into the second version of its states (``Executor.speculate``). If the step or a gradient is another one, the unit is
updated again from its untouched states. That is decided when the update begins, by comparison: no call in between can
be missed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deep_opt_states import log
from deep_opt_states.device.interface import Device, Event
from deep_opt_states.device.kernels.adam import AdamStep
from deep_opt_states.zero.step.running_plan import RunningPlan
from perf_model.schedule.plan import UpdatePlan

LAST_STEPS = 20
"""The number of last steps that decide whether updates start in backward."""

MOST_IN_VAIN = LAST_STEPS // 4
"""The most of them for which updates in backward were, or would have been, in vain. With more, updates run twice."""


@dataclass(frozen=True)
class _Units:
    """The ``eager`` units of ``plan``."""

    plan: UpdatePlan
    eager: frozenset[int]
    of_param: dict[int, frozenset[int]]
    """The units that hold a part of a parameter, by its ``ds_id``."""
    parts: dict[int, list[int]]
    events: dict[int, tuple[Event, Event]]
    """The staging stream -> worker: the gradients are in host memory; and the stream of the reduction -> compute
    stream: they are complete on the accelerator. The events of one unit serve all units of a bucket."""


@dataclass
class _Window:
    """The last micro-batch of one accumulation window. A new one replaces it as a whole, also if an interrupt comes."""

    left: Counter[int]
    """The number of parameters of each unit whose gradients are not complete."""
    complete: set[int] = field(default_factory=set)
    """The ``ds_id`` of each parameter whose gradient is complete."""
    steps: Sequence[AdamStep] | None = None
    """The likely steps, none if they are unknown; None before the first unit is complete."""
    writes: dict[int, list[int]] = field(default_factory=dict)
    """The numbers of writes to the gradients of each unit before its step was speculated."""


class EagerUpdates:
    """The updates in backward of one engine, for ``likely_steps()``, none if unknown. Nothing here is a collective."""

    def __init__(
        self, device: Device[Any], running: RunningPlan, likely_steps: Callable[[], Sequence[AdamStep]]
    ) -> None:
        self._device, self._running, self._likely_steps = device, running, likely_steps
        self._were_in_vain: deque[bool] = deque(maxlen=LAST_STEPS)
        self._is_paused = False
        self._units: _Units | None = None
        self._window = _Window(Counter())

    def reduced(self, params: Sequence[Any]) -> None:
        """Start the updates of units whose gradients are complete with ``params``, reduced on the current stream."""
        # If another backward adds to a gradient that was complete, its units are left to the update.
        running = self._running
        if not running.eager or self._is_paused or running.windows.is_measuring:
            return
        units, window = self._units_of_plan(), self._window
        complete = []
        for param in params:
            if param.ds_id not in window.complete and running.gradients.is_written(param):
                window.complete.add(param.ds_id)
                of_param = units.of_param.get(param.ds_id, frozenset())
                window.left.subtract(of_param)
                complete += [unit for unit in of_param if window.left[unit] == 0]
        if not complete:
            return
        if window.steps is None:
            window.steps = self._likely_steps()
        if window.steps:
            ready, reduced = units.events[complete[0]]
            self._device.current_stream().record(reduced)
            is_copied = running.gradients.record_copies(ready)
            window.writes |= {unit: running.gradients.writes_to(units.parts[unit]) for unit in complete}
            running.executor.speculate(complete, window.steps, ready if is_copied else None, reduced)

    def begin_update(self) -> None:
        """Discard the steps of units whose gradients were written since, and start with the next window."""
        window, units = self._window, self._units
        if window.writes and units is not None:
            writes_to = self._running.gradients.writes_to
            changed = [unit for unit, writes in window.writes.items() if writes != writes_to(units.parts[unit])]
            self._running.executor.forget_speculations(changed)
        self._start_window()

    def forget(self) -> None:
        """Discard the steps that were speculated: the gradients are discarded."""
        if self._window.writes:
            self._running.executor.forget_speculations()
        self._start_window()

    def updated(self, *, is_likely: bool) -> None:
        """Record an update: whether it was the one that was speculated, or if none was, whether it ``is_likely``."""
        kept = self._running.executor.kept_speculations
        self._record(is_in_vain=not (is_likely if kept is None else kept))

    def skipped(self) -> None:
        """Record a step that is skipped, and discard the steps that were speculated for it."""
        self.forget()
        self._record(is_in_vain=True)

    def _record(self, *, is_in_vain: bool) -> None:
        """Stop to update in backward, or start again, if that is due."""
        self._were_in_vain.append(is_in_vain)
        in_vain = self._were_in_vain.count(True)
        if self._running.eager and self._is_paused != (in_vain > MOST_IN_VAIN):
            self._is_paused = not self._is_paused
            change = "stop" if self._is_paused else "start again"
            log.info(
                f"updates in backward {change}: {in_vain} of the last {len(self._were_in_vain)} steps were clipped, "
                f"skipped or changed after backward"
            )

    def _units_of_plan(self) -> _Units:
        plan, eager = self._running.plan, self._running.eager
        if self._units is None or self._units.plan is not plan or self._units.eager != eager:
            unit_of_part = [unit.index for unit in plan.workload.units for _ in unit.ranges]
            parts: dict[int, list[int]] = {unit: [] for unit in eager}
            for part, unit in enumerate(unit_of_part):
                if unit in parts:
                    parts[unit].append(part)
            found = self._running.units_of(self._running.gradients.params_here)
            of_param = {ds_id: eager.intersection(units) for ds_id, units in found.items()}
            events = {unit: (self._device.event(), self._device.event()) for unit in eager}
            self._units = _Units(plan, eager, of_param, parts, events)
            self._start_window()
        return self._units

    def _start_window(self) -> None:
        of_param = {} if self._units is None else self._units.of_param
        self._window = _Window(Counter(unit for units in of_param.values() for unit in units))
