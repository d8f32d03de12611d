"""Define ``Windows``: the seconds of backward and forward that can hide the update."""

from __future__ import annotations

from dataclasses import dataclass

from perf_model.prediction.cost import CostModel
from perf_model.prediction.timeline import Phase, PhaseSpan, Timeline
from perf_model.schedule.action import ActionKind
from perf_model.schedule.schedule import PUBLISHING
from perf_model.schedule.workload import Unit, Workload

ALLOWED_IN_BACKWARD = ActionKind.PREFETCH
"""The kind of action that may start before the norm is known: it reads only the states of the step before."""


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The seconds of the backward before the update and of the forward after it, which the update does not slow down.

    States may be prefetched at the end of backward. After forward, a slot may be flushed until the next backward
    prefetches into it. Both windows are 0 if the update has to finish before ``step()`` returns. ``first_use`` is
    forward's order of units, which defaults to the order of the indices. Forward uses equally many elements in equal
    times, ``Unit.forward_numel`` of them before it needs the next unit.
    """

    backward_s: float = 0.0
    forward_s: float = 0.0
    first_use: tuple[int, ...] | None = None

    def in_order_of_use(self, workload: Workload) -> tuple[Unit, ...]:
        """Return the units in the order in which forward first uses them."""
        if self.first_use is None:
            return workload.units
        return tuple(workload.units[index] for index in self.first_use)

    def exposed_s(self, timeline: Timeline, workload: Workload, cost: CostModel) -> float:
        """Return the seconds of the update by which the iteration grows.

        Forward blocks until the parameters that it needs next are updated. Only flushes may be in flight when it ends,
        and the next backward overlaps with them. It prefetches into a slot as soon as the slot is flushed. Prefetches
        that are late by then expose as much of the next update.
        """
        if self.forward_s == 0.0:
            return timeline.end_s
        blocked_s, ready_s = 0.0, _ready_s(timeline)
        before, numel = 0, workload.forward_numel
        for unit in self.in_order_of_use(workload):
            blocked_s = max(blocked_s, ready_s[unit.index] - self.forward_s * before / numel)
            before += unit.forward_numel
        return blocked_s + self._late_prefetches_s(timeline, blocked_s, cost)

    def _late_prefetches_s(self, timeline: Timeline, blocked_s: float, cost: CostModel) -> float:
        """Return by how much flushes delay the prefetches of the next backward, after a forward that was blocked.

        Both share the link in ``backward_s``, and slow each other down until one of them ends.
        """
        forward_end_s = self.forward_s + blocked_s
        filled_s = -min((span.start_s for span in timeline.spans if span.start_s < 0.0), default=0.0)
        flushed_s = max(0.0, timeline.end_s - forward_end_s)
        prefetch, flush = cost.speeds_of_copies
        late_s = [
            0.0,
            filled_s + flushed_s * ((1.0 - prefetch) / flush) - self.backward_s,
            flushed_s + filled_s * ((1.0 - flush) / prefetch) - self.backward_s,
        ]
        for start_s, end_s in _uses_of_slots(timeline):
            late_s.append(end_s - (forward_end_s + self.backward_s + min(0.0, start_s)))
        return max(late_s)

    def phases(self, timeline: Timeline, workload: Workload, cost: CostModel) -> tuple[PhaseSpan, ...]:
        """Return the phases of the model during the update, until the next backward no longer waits for flushes."""
        ready_s, numel = _ready_s(timeline), workload.forward_numel
        ends_s, now_s = [(Phase.BACKWARD, 0.0)], 0.0
        for unit in self.in_order_of_use(workload):
            start_s = max(now_s, ready_s[unit.index])
            now_s = start_s + self.forward_s * unit.forward_numel / numel
            ends_s += [(Phase.EXPOSED, start_s), (Phase.FORWARD, now_s)]
        late_s = timeline.end_s - now_s
        if self.forward_s > 0.0:
            late_s = self._late_prefetches_s(timeline, now_s - self.forward_s, cost)
        ends_s += [(Phase.BACKWARD, timeline.end_s - late_s), (Phase.EXPOSED, timeline.end_s)]
        spans: list[PhaseSpan] = []
        before_s = -self.backward_s
        for phase, end_s in ends_s:
            if end_s > before_s:
                continues = spans and spans[-1].phase is phase
                start_s = spans.pop().start_s if continues else before_s
                spans.append(PhaseSpan(phase, start_s, end_s))
                before_s = end_s
        return tuple(spans)


def _ready_s(timeline: Timeline) -> dict[int, float]:
    return {span.action.unit: span.end_s for span in timeline.spans if span.action.kind in PUBLISHING}


def _uses_of_slots(timeline: Timeline) -> list[tuple[float, float]]:
    """Return when slots are first filled, and when the last flushes of the update before empty them."""
    starts_s: dict[int | None, float] = {}
    ends_s: dict[int | None, float] = {}
    for span in timeline.spans:
        slot = span.action.slot
        if span.action.kind is ActionKind.PREFETCH:
            starts_s[slot] = min(span.start_s, starts_s.get(slot, span.start_s))
        elif span.action.kind is ActionKind.FLUSH_STATES:
            ends_s[slot] = max(span.end_s, ends_s.get(slot, span.end_s))
    return list(zip(sorted(starts_s.values()), sorted(ends_s.values()), strict=True))
