"""A ``Timeline``: when each action of a schedule ran, predicted or measured; and what the model did meanwhile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from perf_model.schedule.action import Action, Lane


@dataclass(frozen=True)
class Span:
    """Seconds since the update was decided; before that for what was prefetched during backward."""

    action: Action
    start_s: float
    end_s: float


MODEL = "model"
"""Whose phases are shown above the lanes."""


class Phase(Enum):
    """What the model does beside the update."""

    BACKWARD = "backward"
    FORWARD = "forward"
    EXPOSED = "exposed update"
    """It stands still, and waits for the update."""


@dataclass(frozen=True)
class PhaseSpan:
    """Seconds since the update was decided, as a ``Span`` has them."""

    phase: Phase
    start_s: float
    end_s: float


def seconds_of(phase: Phase, phases: Sequence[PhaseSpan]) -> float:
    return sum(span.end_s - span.start_s for span in phases if span.phase is phase)


@dataclass(frozen=True)
class Timeline:
    spans: tuple[Span, ...]

    @property
    def end_s(self) -> float:
        """The end of the last action."""
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def makespan_s(self) -> float:
        """From 0, or from the first action where one is earlier, to the end of the last action."""
        return self.end_s - min((span.start_s for span in self.spans if span.start_s < 0), default=0.0)

    @property
    def active_s(self) -> float:
        """Seconds in which any action ran."""
        active_s, until_s = 0.0, float("-inf")
        for span in sorted(self.spans, key=lambda span: span.start_s):
            active_s += max(0.0, span.end_s - max(span.start_s, until_s))
            until_s = max(until_s, span.end_s)
        return active_s

    def hidden_s(self, exposed_s: float) -> float:
        """What nobody saw of it, where so many seconds were seen."""
        return max(0.0, self.active_s - exposed_s)

    def busy_s(self, lane: Lane) -> float:
        """Seconds in which ``lane`` ran an action. Actions of one lane never overlap."""
        return sum(span.end_s - span.start_s for span in self.spans if span.action.lane is lane)

    def chrome_trace(self, phases: Sequence[PhaseSpan] = ()) -> dict[str, object]:
        """The Trace Event Format that Perfetto and chrome://tracing open; a thread for the model, and one a lane."""
        threads = [*([MODEL] if phases else []), *(lane.value for lane in Lane)]
        events: list[dict[str, object]] = [
            {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": thread}}
            for tid, thread in enumerate(threads)
        ]

        def add(thread: str, name: str, span: Span | PhaseSpan, **args: object) -> None:
            events.append(
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": threads.index(thread),
                    "name": name,
                    "ts": span.start_s * 1e6,
                    "dur": (span.end_s - span.start_s) * 1e6,
                    "args": args,
                }
            )

        for its in phases:
            add(MODEL, its.phase.value, its)
        for span in self.spans:
            action = span.action
            add(action.lane.value, action.name, span, slot=action.slot, after=list(action.waits))
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def write_chrome_trace(self, path: Path, phases: Sequence[PhaseSpan] = ()) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.chrome_trace(phases)))

    @classmethod
    def from_chrome_trace(cls, trace: Any) -> tuple[Timeline, tuple[PhaseSpan, ...]]:
        """The inverse of ``chrome_trace``. Raises ``ValueError`` for what is no such trace."""
        spans: list[Span] = []
        phases: list[PhaseSpan] = []
        try:
            for event in trace["traceEvents"]:
                if event["ph"] != "X":
                    continue
                start_s, name, args = event["ts"] / 1e6, event["name"], event["args"]
                end_s = start_s + event["dur"] / 1e6
                if "slot" in args:
                    action = replace(Action.parse(name), slot=args["slot"], waits=tuple(args["after"]))
                    spans.append(Span(action, start_s, end_s))
                else:
                    phases.append(PhaseSpan(Phase(name), start_s, end_s))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no trace of an update: {type(error).__name__}: {error}") from None
        return cls(tuple(spans)), tuple(phases)
