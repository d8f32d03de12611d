"""Define ``Windows``: the seconds of backward and forward that can hide the update."""

from __future__ import annotations

from dataclasses import dataclass

from perf_model.prediction.timeline import Phase, PhaseSpan, Timeline
from perf_model.schedule.action import ActionKind
from perf_model.schedule.workload import Unit, Workload

ALLOWED_IN_BACKWARD = ActionKind.PREFETCH
"""The only kind of action that may start before the norm of the gradients is known: it reads nothing but the states,
which the previous step wrote."""


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The windows that overlap with the update.

    ``backward_s`` is the backward that ends before the update, and ``forward_s`` is the next forward. States may be
    prefetched in the tail of backward. After forward, states may be flushed until the next backward prefetches again.
    ``first_use`` names each unit once, in the order in which forward first uses them; None is the order of the indices.
    The later forward needs the parameters of a unit, the longer its update can be hidden: forward uses equally many
    elements in equal times, and ``Unit.forward_numel`` of them before it needs the next unit. Both windows are 0 if the
    update has to finish before ``step()`` returns. The update is assumed to slow down neither backward nor forward.
    With several micro-batches per step, the flushes have more time than is assumed here: one backward.
    """

    backward_s: float = 0.0
    forward_s: float = 0.0
    first_use: tuple[int, ...] | None = None

    @property
    def hidden_in_backward(self) -> tuple[ActionKind, ...]:
        """Return the kinds of actions that overlap with the backward before the update or after it."""
        return (ActionKind.PREFETCH, ActionKind.FLUSH_STATES) if self.forward_s > 0.0 else (ActionKind.PREFETCH,)

    def in_order_of_use(self, workload: Workload) -> tuple[Unit, ...]:
        """Return the units in the order in which forward first uses them."""
        if self.first_use is None:
            return workload.units
        return tuple(workload.units[index] for index in self.first_use)

    def exposed_s(self, timeline: Timeline, workload: Workload) -> float:
        """Return the exposed seconds of the update: those by which the iteration grows.

        Second 0 is the moment at which the step is decided. Forward blocks until the parameters that it needs next are
        updated, and everything after that is delayed as much. Only flushes may be left when forward ends. The next
        backward overlaps with them until it prefetches into the slots again; prefetches that are late by then expose
        as much of the next update. ``phases`` gives the same result moment by moment.
        """
        if self.forward_s == 0.0:
            return timeline.end_s
        exposed_s = max(0.0, timeline.end_s - self.forward_s - self.flushing_s(timeline))
        ready_s = _ready_s(timeline)
        before, numel = 0, workload.forward_numel
        for unit in self.in_order_of_use(workload):
            exposed_s = max(exposed_s, ready_s[unit.index] - self.forward_s * before / numel)
            before += unit.forward_numel
        return exposed_s

    def flushing_s(self, timeline: Timeline) -> float:
        """Return how long states may be flushed after forward: until the next backward prefetches as this one did."""
        if self.forward_s == 0.0:
            return 0.0
        return self.backward_s + min((span.start_s for span in timeline.spans if span.start_s < 0.0), default=0.0)

    def phases(self, timeline: Timeline, workload: Workload) -> tuple[PhaseSpan, ...]:
        """Return the phases of the model during the update: backward, forward, and the waits for the update.

        If flushes are left when forward ends, the next backward follows, until they have ended or it would prefetch.
        """
        ready_s, numel = _ready_s(timeline), workload.forward_numel
        ends_s, now_s = [(Phase.BACKWARD, 0.0)], 0.0
        for unit in self.in_order_of_use(workload):
            start_s = max(now_s, ready_s[unit.index])
            now_s = start_s + self.forward_s * unit.forward_numel / numel
            ends_s += [(Phase.EXPOSED, start_s), (Phase.FORWARD, now_s)]
        ends_s += [(Phase.BACKWARD, min(timeline.end_s, now_s + self.flushing_s(timeline)))]
        ends_s += [(Phase.EXPOSED, timeline.end_s)]
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
    """Return, by unit, when its parameters are ready for forward."""
    return {
        span.action.unit: span.end_s
        for span in timeline.spans
        if span.action.kind in (ActionKind.GPU_STEP, ActionKind.PUBLISH)
    }
