"""Define ``Timeline``: the predicted or measured times of the actions of a schedule, and the phases of the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from perf_model.schedule.action import Action, ActionKind, Lane, lanes_of


@dataclass(frozen=True)
class Span:
    """The time of one action, in seconds since the step was decided. It is negative in backward."""

    action: Action
    start_s: float
    end_s: float


MODEL = "model"


class Phase(Enum):
    """The state of the model while the update runs."""

    BACKWARD = "backward"
    FORWARD = "forward"
    EXPOSED = "exposed update"


@dataclass(frozen=True)
class PhaseSpan:
    """The time of one phase, in seconds since the step was decided."""

    phase: Phase
    start_s: float
    end_s: float


class IterationTimes(NamedTuple):
    """The start of an iteration's first backward, and the next decision of an update, in seconds since the last one."""

    backward_start_s: float | None
    end_s: float


def seconds_of(phase: Phase, phases: Sequence[PhaseSpan]) -> float:
    return sum(span.end_s - span.start_s for span in phases if span.phase is phase)


@dataclass(frozen=True)
class Timeline:
    """The spans of the actions of one update, in the order of the schedule."""

    spans: tuple[Span, ...]

    @property
    def start_s(self) -> float:
        """Return the start of the first action if that is in backward, or else 0."""
        return min((span.start_s for span in self.spans if span.start_s < 0.0), default=0.0)

    @property
    def end_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def active_s(self) -> float:
        """Return the seconds in which at least one action ran."""
        return self.busy_s(*Lane)

    @property
    def lanes(self) -> list[Lane]:
        return lanes_of(span.action for span in self.spans)

    def hidden_s(self, exposed_s: float) -> float:
        return max(0.0, self.active_s - exposed_s)

    def busy_s(self, *lanes: Lane) -> float:
        """Return the seconds in which at least one of ``lanes`` ran an action."""
        return sum(end_s - start_s for start_s, end_s in self.busy_spans(*lanes))

    def busy_spans(self, *lanes: Lane) -> list[tuple[float, float]]:
        """Return when at least one of ``lanes`` runs an action: pairs of start and end, in order and apart."""
        found: list[tuple[float, float]] = []
        for start_s, end_s in sorted((span.start_s, span.end_s) for span in self.spans if span.action.lane in lanes):
            if found and start_s <= found[-1][1]:
                found[-1] = found[-1][0], max(end_s, found[-1][1])
            else:
                found.append((start_s, end_s))
        return found

    def seconds_by_kind(self) -> dict[ActionKind, float]:
        busy_s = dict.fromkeys(ActionKind, 0.0)
        for span in self.spans:
            busy_s[span.action.kind] += span.end_s - span.start_s
        return busy_s

    def chrome_trace(self, phases: Sequence[PhaseSpan] = ()) -> dict[str, object]:
        """Return the Trace Event Format of Perfetto, with one thread per lane and one for ``phases``."""
        threads = [*([MODEL] if phases else []), *(lane.value for lane in self.lanes)]
        events: list[dict[str, object]] = [
            {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": thread}}
            for tid, thread in enumerate(threads)
        ]

        def add(thread: str, name: str, span: Span | PhaseSpan, **args: object) -> None:
            times = {"ts": span.start_s * 1e6, "dur": (span.end_s - span.start_s) * 1e6}
            events.append({"ph": "X", "pid": 0, "tid": threads.index(thread), "name": name, **times, "args": args})

        for phase_span in phases:
            add(MODEL, phase_span.phase.value, phase_span)
        for span in self.spans:
            action = span.action
            add(action.lane.value, action.name, span, slot=action.slot, after=list(action.waits))
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def write_chrome_trace(self, path: Path, phases: Sequence[PhaseSpan] = ()) -> None:
        """Write ``chrome_trace`` to ``path``, and create its folder. Raise ``OSError`` on failure."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.chrome_trace(phases)))

    @classmethod
    def from_chrome_trace(cls, trace: Any) -> tuple[Timeline, tuple[PhaseSpan, ...]]:
        """Return the timeline and the phases of a ``chrome_trace``. Raise ``ValueError`` if it is malformed."""
        spans: list[Span] = []
        phases: list[PhaseSpan] = []
        try:
            for event in trace["traceEvents"]:
                if event["ph"] != "X":
                    continue
                start_s, name, args = event["ts"] / 1e6, event["name"], event["args"]
                end_s = start_s + event["dur"] / 1e6
                if "slot" in args:
                    kind, unit = name.split()
                    action = Action(ActionKind[kind], int(unit), args["slot"], tuple(args["after"]))
                    spans.append(Span(action, start_s, end_s))
                else:
                    phases.append(PhaseSpan(Phase(name), start_s, end_s))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the trace of an update: {type(error).__name__}: {error}") from None
        return cls(tuple(spans)), tuple(phases)
