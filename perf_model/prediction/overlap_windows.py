"""Define ``Windows``: the seconds of backward and forward that can hide the update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from perf_model.prediction.cost import CostModel
from perf_model.prediction.slowdown import NO_SLOWDOWN, ModelProgress, Slowdown
from perf_model.prediction.timeline import Phase, PhaseSpan, Timeline
from perf_model.schedule.action import ActionKind
from perf_model.schedule.happens_before import EMPTIED_BY
from perf_model.schedule.schedule import PUBLISHING
from perf_model.schedule.workload import Workload
from perf_model.units import seconds


class AddedTime(NamedTuple):
    """The seconds by which an update lengthens an iteration."""

    exposed_s: float
    """The seconds in which the model waits for the update."""
    slowed_s: float
    """The seconds by which backward and forward take longer during the update."""

    @property
    def total_s(self) -> float:
        return self.exposed_s + self.slowed_s


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The seconds of the backward before the update and of the forward after it, without an update alongside.

    States may be prefetched at the end of backward, and eager units are updated in it as soon as their gradients are
    complete. Both windows are 0 if the update has to finish before ``step()`` returns. Forward uses equally many
    elements in equal times, ``Unit.forward_numel`` of them before the next unit, and backward completes them in the
    reverse order. The update slows both down, but more time for the update in a longer backward is neglected.
    """

    backward_s: float = 0.0
    forward_s: float = 0.0
    slowdown: Slowdown = NO_SLOWDOWN

    def __str__(self) -> str:
        times = f"{seconds(self.backward_s)} of backward and {seconds(self.forward_s)} of forward"
        return times if self.slowdown == NO_SLOWDOWN else f"{times}, {self.slowdown}"

    def completed_s(self, workload: Workload) -> dict[int, float]:
        """Return when backward passes the first use of each unit, from the last moment to the first one."""
        moments_s, used = {}, 0
        for unit in workload.in_order_of_use:
            moments_s[unit.index] = -self.backward_s * used / workload.forward_numel
            used += unit.forward_numel
        return moments_s

    def added_time(self, timeline: Timeline, workload: Workload, cost: CostModel) -> AddedTime:
        """Return the seconds by which the update lengthens the iteration.

        Forward blocks until the parameters that it needs next are updated. Only flushes may be in flight when it ends,
        and the next backward overlaps with them. It prefetches into a slot as soon as the slot is flushed. Prefetches
        that are late by then expose as much of the next update.
        """
        progress = ModelProgress(timeline, self.slowdown)
        slowed_s = progress.lost_s(timeline.start_s, 0.0)
        if self.forward_s == 0.0:
            return AddedTime(timeline.end_s, slowed_s)
        blocked_s = now_s = 0.0
        for start_s, end_s in self._uses(timeline, workload, progress):
            blocked_s += start_s - now_s
            now_s = end_s
        late_s = self._late_prefetches_s(timeline, now_s, cost)
        if self.slowdown != NO_SLOWDOWN:
            slowed_s += max(0.0, now_s - blocked_s - self.forward_s)
        # The flushes that are left when the next backward starts.
        slowed_s += progress.lost_s(now_s, max(now_s, min(timeline.end_s, now_s + self.backward_s)))
        return AddedTime(blocked_s + late_s, slowed_s)

    def _uses(self, timeline: Timeline, workload: Workload, progress: ModelProgress) -> Iterator[tuple[float, float]]:
        """Yield when forward starts to use the parameters of each unit, and when it needs the next unit."""
        ready_s = {span.action.unit: span.end_s for span in timeline.spans if span.action.kind in PUBLISHING}
        numel, now_s = workload.forward_numel, 0.0
        for unit in workload.in_order_of_use:
            start_s = max(now_s, ready_s[unit.index])
            now_s = progress.end_s(start_s, self.forward_s * unit.forward_numel / numel)
            yield start_s, now_s

    def _late_prefetches_s(self, timeline: Timeline, forward_end_s: float, cost: CostModel) -> float:
        """Return by how much flushes delay the prefetches of the backward that starts at ``forward_end_s``.

        Both share the link in ``backward_s``, and slow each other down until one of them ends. In the same way, writes
        to disk delay reads.
        """
        filling = [span for span in timeline.spans if span.action.kind is ActionKind.PREFETCH and not span.action.waits]
        start_s = min((span.start_s for span in filling if span.start_s < 0.0), default=0.0)
        # Eager units fill the slots long before second 0.
        filled_s = min(0.0, max((span.end_s for span in filling), default=0.0)) - start_s
        ends_s = (span.end_s for span in timeline.spans if span.action.kind is not ActionKind.WRITE)
        flushed_s = max(0.0, max(ends_s, default=0.0) - forward_end_s)
        prefetch, flush = cost.speeds_of_copies
        late_s = [
            0.0,
            filled_s + flushed_s * ((1.0 - prefetch) / flush) - self.backward_s,
            flushed_s + filled_s * ((1.0 - flush) / prefetch) - self.backward_s,
        ]
        for start_s, end_s in chain(*(_uses_of_slots(timeline, *kinds) for kinds in EMPTIED_BY.items())):
            late_s.append(end_s - (forward_end_s + self.backward_s + min(0.0, start_s)))
        return max(late_s)

    def phases(self, timeline: Timeline, workload: Workload, cost: CostModel) -> tuple[PhaseSpan, ...]:
        """Return the phases of the model during the update, until the next backward no longer waits for flushes."""
        progress = ModelProgress(timeline, self.slowdown)
        ends_s, now_s = [(Phase.BACKWARD, 0.0)], 0.0
        for start_s, now_s in self._uses(timeline, workload, progress):
            ends_s += [(Phase.EXPOSED, start_s), (Phase.FORWARD, now_s)]
        late_s = timeline.end_s - now_s
        if self.forward_s > 0.0:
            late_s = self._late_prefetches_s(timeline, now_s, cost)
        ends_s += [(Phase.BACKWARD, timeline.end_s - late_s), (Phase.EXPOSED, timeline.end_s)]
        spans: list[PhaseSpan] = []
        before_s = -self.backward_s - progress.lost_s(timeline.start_s, 0.0)
        for phase, end_s in ends_s:
            if end_s > before_s:
                continues = spans and spans[-1].phase is phase
                start_s = spans.pop().start_s if continues else before_s
                spans.append(PhaseSpan(phase, start_s, end_s))
                before_s = end_s
        return tuple(spans)


def slowest(windows: Sequence[Windows]) -> Windows:
    """Return the shortest windows of all ranks, and the largest slowdown: all ranks wait for the slowest one."""
    return Windows(
        backward_s=min(each.backward_s for each in windows),
        forward_s=min(each.forward_s for each in windows),
        slowdown=Slowdown(
            cpu=max(each.slowdown.cpu for each in windows), copies=max(each.slowdown.copies for each in windows)
        ),
    )


def _uses_of_slots(timeline: Timeline, fills: ActionKind, empties: ActionKind) -> list[tuple[float, float]]:
    """Return when slots are first filled, and when the last actions of the update before empty them."""
    starts_s: dict[int | None, float] = {}
    ends_s: dict[int | None, float] = {}
    for span in timeline.spans:
        slot = span.action.slot
        if span.action.kind is fills:
            starts_s[slot] = min(span.start_s, starts_s.get(slot, span.start_s))
        elif span.action.kind is empties:
            ends_s[slot] = max(span.end_s, ends_s.get(slot, span.end_s))
    return list(zip(sorted(starts_s.values()), sorted(ends_s.values()), strict=True))
