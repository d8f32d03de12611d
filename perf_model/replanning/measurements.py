"""Summarize the measured seconds of the last steps, to plan with them.

Each rank adds one ``StepMeasurement`` per step to its ``TrailingWindow``. From time to time, the ranks exchange their
medians, and ``slowest_rank`` combines them: an iteration waits for the slowest rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.timeline import Phase, PhaseSpan, Timeline, seconds_of
from perf_model.schedule.action import ActionKind

WINDOW_STEPS = 50
"""The number of steps whose medians count as the present rates."""

EXAMINED_EVERY = 25
"""The number of steps after which the window is examined again. Then a change at any step is in the medians of two
consecutive examinations before two windows have passed."""

FIRST_STEPS = 5
"""The number of steps whose medians are the first windows of backward and forward."""


@dataclass(frozen=True, kw_only=True)
class StepMeasurement:
    """The measured seconds of one step that was not skipped.

    ``by_kind`` sums the actions of each kind that ran. ``windows`` has the seconds of the tail of backward in which
    prefetches are allowed, and the seconds that forward takes without the time in which it waits for the update.
    ``exposed_s`` is that time.
    """

    step: int
    by_kind: Mapping[ActionKind, float]
    windows: Windows
    exposed_s: float

    @classmethod
    def from_update(cls, step: int, timeline: Timeline, phases: Sequence[PhaseSpan]) -> StepMeasurement:
        """Return the seconds of the update with this timeline, during which the model was in ``phases``.

        For the windows to be complete, the backward phase has to begin where the first prefetch is allowed, even if
        nothing is prefetched, and the last forward phase has to end where the next backward begins.
        """
        return cls(
            step=step,
            by_kind=timeline.seconds_by_kind(),
            windows=Windows(backward_s=seconds_of(Phase.BACKWARD, phases), forward_s=seconds_of(Phase.FORWARD, phases)),
            exposed_s=seconds_of(Phase.EXPOSED, phases),
        )


@dataclass(frozen=True, kw_only=True)
class WindowMeasurement:
    """The medians over the steps from ``first_step`` to ``last_step``, of one rank or of the slowest rank."""

    first_step: int
    last_step: int
    by_kind: Mapping[ActionKind, float]
    windows: Windows
    exposed_s: float

    def to_json_dict(self) -> dict[str, Any]:
        """Return the values to exchange with other ranks."""
        return {
            "first_step": self.first_step,
            "last_step": self.last_step,
            "by_kind": {kind.value: kind_s for kind, kind_s in self.by_kind.items()},
            "backward_s": self.windows.backward_s,
            "forward_s": self.windows.forward_s,
            "exposed_s": self.exposed_s,
        }

    @classmethod
    def from_json_dict(cls, values: Mapping[str, Any]) -> WindowMeasurement:
        """Return the measurement with these values; the inverse of ``to_json_dict``."""
        return cls(
            first_step=values["first_step"],
            last_step=values["last_step"],
            by_kind={ActionKind(kind): kind_s for kind, kind_s in values["by_kind"].items()},
            windows=Windows(backward_s=values["backward_s"], forward_s=values["forward_s"]),
            exposed_s=values["exposed_s"],
        )


class TrailingWindow:
    """The measurements of this rank's last steps, at most ``WINDOW_STEPS`` of them, all with the same plan.

    ``count_step`` counts steps, and not measurements, so that all ranks exchange their medians after the same steps
    even if a step of one of them was not measured.
    """

    def __init__(self) -> None:
        self._measured: deque[StepMeasurement] = deque(maxlen=WINDOW_STEPS)
        self._steps = 0
        self._until_due = FIRST_STEPS
        self._first = True

    def add(self, measured: StepMeasurement) -> None:
        """Add the measurement of a step, and forget the oldest one if there are more than ``WINDOW_STEPS``."""
        self._measured.append(measured)

    def count_step(self) -> bool:
        """Count a step, and return whether the medians are due.

        They are due after the first ``FIRST_STEPS`` steps, then as soon as there are ``WINDOW_STEPS`` steps with one
        plan, and then every ``EXAMINED_EVERY`` steps.
        """
        self._steps += 1
        self._until_due -= 1
        if self._until_due > 0:
            return False
        self._first = False
        self._until_due = EXAMINED_EVERY if self._steps >= WINDOW_STEPS else WINDOW_STEPS - self._steps
        return True

    def postpone(self) -> None:
        """Let the medians be due again after the next step. Every rank calls this after the same step."""
        self._until_due = 1

    def restart(self) -> None:
        """Forget all steps, because another plan runs from now on."""
        self._measured.clear()
        self._steps = 0
        self._until_due = FIRST_STEPS if self._first else WINDOW_STEPS

    def medians(self) -> WindowMeasurement | None:
        """Return the medians over all measurements that are remembered, or None if there are none."""
        steps = self._measured
        if not steps:
            return None
        kinds = {kind: None for measured in steps for kind in measured.by_kind}
        return WindowMeasurement(
            first_step=steps[0].step,
            last_step=steps[-1].step,
            by_kind={kind: median(measured.by_kind.get(kind, 0.0) for measured in steps) for kind in kinds},
            windows=Windows(
                backward_s=median(measured.windows.backward_s for measured in steps),
                forward_s=median(measured.windows.forward_s for measured in steps),
            ),
            exposed_s=median(measured.exposed_s for measured in steps),
        )


def slowest_rank(of_ranks: Sequence[WindowMeasurement]) -> WindowMeasurement:
    """Return the measurement to plan with: the most seconds of each kind, and the shortest windows, of all ranks."""
    first = of_ranks[0]
    return WindowMeasurement(
        first_step=first.first_step,
        last_step=first.last_step,
        by_kind={kind: max(measured.by_kind.get(kind, 0.0) for measured in of_ranks) for kind in first.by_kind},
        windows=Windows(
            backward_s=min(measured.windows.backward_s for measured in of_ranks),
            forward_s=min(measured.windows.forward_s for measured in of_ranks),
        ),
        exposed_s=max(measured.exposed_s for measured in of_ranks),
    )
