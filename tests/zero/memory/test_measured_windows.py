"""Check when backward and forward are measured without a concurrent update, and how slowdowns are found."""

from __future__ import annotations

import pytest

from deep_opt_states.zero.step.measured_windows import FIRST_UPDATES, MeasuredWindows
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.timeline import Phase, PhaseSpan, Span, Timeline
from perf_model.schedule.action import Action, ActionKind
from tests.profiler.virtual import VirtualDevice


class TrainingBesideUpdates:
    def __init__(self, updates: int = FIRST_UPDATES) -> None:
        self.device = VirtualDevice()
        self.windows = MeasuredWindows(self.device, updates, needs_forward=updates > 0)
        self.inside: list[bool] = []

    def step(self, forward_s: float, backward_s: float, copies_s: float = 0.0) -> None:
        self.windows.before_forward(trains=True)
        self.device.now_s += forward_s
        self.windows.backward_starts()
        if self.inside and not self.inside[-1]:
            spans = [Span(Action(ActionKind.CPU_STEP, 0, None, ()), 0.0, 1.0)]
            if copies_s:
                spans.append(Span(Action(ActionKind.PREFETCH, 1, 0, ()), 0.0, copies_s))
            phases = [PhaseSpan(Phase.EXPOSED, 0.0, 0.0), PhaseSpan(Phase.FORWARD, 0.0, forward_s)]
            self.windows.updated(phases, lambda: Timeline(tuple(spans)))
        self.device.now_s += backward_s
        self.windows.backward_starts()
        self.inside.append(self.windows.is_measuring)
        self.windows.update_starts()
        if self.inside[-1]:
            phases = [PhaseSpan(Phase.BACKWARD, -backward_s, 0.0), PhaseSpan(Phase.EXPOSED, 0.0, 5.0)]
            self.windows.updated(phases, lambda: Timeline(()))
            self.device.now_s += 5.0
            self.windows.read_forward()
            self.windows.forward_starts()


@pytest.mark.P5
def test_forward_and_backward_are_measured_without_an_update_alongside_them_and_the_slowdown_with_one() -> None:
    run = TrainingBesideUpdates()
    run.step(9.0, 1.0)
    assert run.windows.windows() is None, "no forward has followed an update"
    for forward_s, backward_s in ((2.0, 3.0), (4.0, 5.0), (3.0, 7.0)):
        run.step(forward_s, backward_s)
    assert run.inside == [True] * FIRST_UPDATES + [False]
    assert run.windows.windows() == Windows(backward_s=3.0, forward_s=3.0)
    # All of an update of 1 s runs during forward, which is no window.
    run.step(3.5, 60.0)
    found = run.windows.windows()
    assert (found.backward_s, found.forward_s) == (3.0, 3.0)
    assert (found.slowdown.cpu, found.slowdown.copies) == (pytest.approx(0.5, abs=0.01), 0.0)
    for _ in range(3):
        run.step(3.7, 1.0, copies_s=0.5)
    slowdown = run.windows.windows().slowdown
    assert (slowdown.cpu, slowdown.copies) == pytest.approx((0.5, 0.4), abs=0.02)


def test_windows_are_measured_again_in_one_step() -> None:
    run = TrainingBesideUpdates()
    for _ in range(FIRST_UPDATES + 2):
        run.step(3.0, 1.0)
    run.windows.measure_again()
    run.step(3.0, 2.0)
    assert run.windows.windows() is None
    run.step(4.0, 1.0)
    assert run.inside[-2:] == [True, False]
    found = run.windows.windows()
    assert (found.backward_s, found.forward_s) == (2.0, 4.0)


@pytest.mark.P5
def test_an_evaluation_after_the_update_is_no_part_of_forward() -> None:
    run = TrainingBesideUpdates()
    run.step(1.0, 1.0)
    run.windows.before_forward(trains=False)
    run.device.now_s += 1000.0
    run.step(2.0, 1.0)
    assert run.windows.windows() == Windows(backward_s=1.0, forward_s=2.0)
    # Backward recomputes layers, and reads no window.
    run.windows.before_forward(trains=False)
    run.step(4.0, 1.0)
    assert run.windows.windows() == Windows(backward_s=1.0, forward_s=3.0)


def test_without_an_update_alongside_forward_only_backward_is_measured_and_without_a_need_nothing() -> None:
    windows = TrainingBesideUpdates(updates=0).windows
    windows.measure_again()
    assert (windows.is_measuring, windows.windows()) == (False, Windows())
    windows = MeasuredWindows(VirtualDevice(), FIRST_UPDATES, needs_forward=False)
    for backward_s in (2.0, 4.0, 3.0, 9.0):
        windows.update_starts()
        phases = [PhaseSpan(Phase.BACKWARD, -backward_s, 0.0), PhaseSpan(Phase.EXPOSED, 0.0, 1.0)]
        windows.updated(phases, lambda: Timeline(()))
        windows.forward_starts()
    assert windows.windows() == Windows(backward_s=3.0)
