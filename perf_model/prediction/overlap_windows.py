"""``Windows``: seconds beside the update in which its work is not seen (DESIGN 6)."""

from __future__ import annotations

from dataclasses import dataclass

from perf_model.prediction.timeline import Phase, PhaseSpan, Timeline
from perf_model.schedule.action import ActionKind
from perf_model.schedule.workload import Workload

EARLY = ActionKind.PREFETCH
"""The one kind that may start before the gradients' norm is known: the states that it reads, the last step wrote."""


@dataclass(frozen=True, kw_only=True)
class Windows:
    """``backward_s``: the tail of backward in which states may be prefetched. ``forward_s``: the next forward.

    A forward window is used in the order of the sub-groups, which is forward's: what is updated late hides the longer
    the later forward needs it. Both are 0 where the update has to be over when ``step()`` returns. Neither backward nor
    forward is taken to be slowed by what runs beside it.
    """

    backward_s: float = 0.0
    forward_s: float = 0.0

    def exposed_s(self, timeline: Timeline, workload: Workload) -> float:
        """Seconds of the update, 0 being the moment the step is decided, by which the iteration grows.

        Forward stands still until the parameters it needs next are there, and is later by as much from then on; all
        work is done before the next backward, whose gradients take the place of these. ``phases`` has it moment by
        moment.
        """
        if self.forward_s == 0.0:
            return timeline.end_s
        exposed_s = max(0.0, timeline.end_s - self.forward_s)
        ready_s = _ready_s(timeline)
        before, numel = 0, workload.numel
        for sub_group in workload.sub_groups:
            exposed_s = max(exposed_s, ready_s[sub_group.index] - self.forward_s * before / numel)
            before += sub_group.numel
        return exposed_s

    def phases(self, timeline: Timeline, workload: Workload) -> tuple[PhaseSpan, ...]:
        """What the model does beside the update: backward, forward, and where it waits for it."""
        ready_s, numel = _ready_s(timeline), workload.numel
        ends_s, now_s = [(Phase.BACKWARD, 0.0)], 0.0
        for sub_group in workload.sub_groups:
            start_s = max(now_s, ready_s[sub_group.index])
            now_s = start_s + self.forward_s * sub_group.numel / numel
            ends_s += [(Phase.EXPOSED, start_s), (Phase.FORWARD, now_s)]
        ends_s.append((Phase.EXPOSED, timeline.end_s))
        spans: list[PhaseSpan] = []
        before_s = -self.backward_s
        for phase, end_s in ends_s:
            if end_s > before_s:
                alike = spans and spans[-1].phase is phase
                start_s = spans.pop().start_s if alike else before_s
                spans.append(PhaseSpan(phase, start_s, end_s))
                before_s = end_s
        return tuple(spans)


def _ready_s(timeline: Timeline) -> dict[int, float]:
    """By sub-group, when forward can have its parameters.

    The host issues in the schedule's order and blocks in between, so that is after whatever is issued before.
    """
    return {
        span.action.sub_group: span.end_s
        for span in timeline.spans
        if span.action.kind in (ActionKind.GPU_STEP, ActionKind.PUBLISH)
    }
