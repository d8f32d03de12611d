"""Check which measured seconds are planned with, when they are due, and how those of all ranks are combined."""

from __future__ import annotations

import json

import pytest

from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.timeline import Phase, PhaseSpan, Span, Timeline
from perf_model.replanning.measurements import (
    EXAMINED_EVERY,
    FIRST_STEPS,
    WINDOW_STEPS,
    StepMeasurement,
    TrailingWindow,
    WindowMeasurement,
    slowest_rank,
)
from perf_model.schedule.action import Action, ActionKind

CPU_STEP, PREFETCH = ActionKind.CPU_STEP, ActionKind.PREFETCH


def measured(step: int, cpu_s: float = 1.0, forward_s: float = 0.5) -> StepMeasurement:
    windows = Windows(backward_s=0.25, forward_s=forward_s)
    return StepMeasurement(step=step, by_kind={CPU_STEP: cpu_s}, windows=windows, exposed_s=2 * cpu_s)


def add(window: TrailingWindow, step: StepMeasurement | None) -> WindowMeasurement | None:
    """Add a step, which was not measured if ``step`` is None, and return the medians if they are due."""
    if step is not None:
        window.add(step)
    return window.medians() if window.count_step() else None


def test_forward_is_measured_without_the_time_in_which_it_waits() -> None:
    phases = (
        PhaseSpan(Phase.BACKWARD, -0.3, 0.0),
        PhaseSpan(Phase.EXPOSED, 0.0, 0.1),
        PhaseSpan(Phase.FORWARD, 0.1, 0.15),
        PhaseSpan(Phase.EXPOSED, 0.15, 0.4),
        PhaseSpan(Phase.FORWARD, 0.4, 0.6),
    )
    spans = (Span(Action(CPU_STEP, 0), 0.0, 0.2), Span(Action(CPU_STEP, 1), 0.2, 0.3), Span(Action(PREFETCH, 2), 0, 1))
    found = StepMeasurement.from_update(7, Timeline(spans), phases)
    assert found.by_kind == {CPU_STEP: pytest.approx(0.3), PREFETCH: 1.0}
    assert found.windows == Windows(backward_s=0.3, forward_s=pytest.approx(0.25))
    assert found.exposed_s == pytest.approx(0.35)


def test_medians_are_due_after_the_first_steps_then_with_a_full_window_then_every_half_window() -> None:
    window = TrailingWindow()
    due = {step: found for step in range(1, 121) if (found := add(window, measured(step)))}
    assert list(due) == [FIRST_STEPS, WINDOW_STEPS, WINDOW_STEPS + EXAMINED_EVERY, WINDOW_STEPS + 2 * EXAMINED_EVERY]
    assert [(found.first_step, found.last_step) for found in due.values()] == [(1, 5), (1, 50), (26, 75), (51, 100)]


@pytest.mark.parametrize(("first", "expected"), [(3, FIRST_STEPS), (20, WINDOW_STEPS)])
def test_steps_with_another_plan_do_not_count(first: int, expected: int) -> None:
    window = TrailingWindow()
    for step in range(1, first + 1):
        add(window, measured(step, cpu_s=100.0))
    window.restart()
    due = [found for step in range(first + 1, first + expected + 1) if (found := add(window, measured(step)))]
    assert [(found.first_step, found.last_step) for found in due] == [(first + 1, first + expected)]
    assert due[0].by_kind == {CPU_STEP: 1.0}


def test_medians_that_are_postponed_are_due_after_the_next_step_and_count_all_steps() -> None:
    window = TrailingWindow()
    for step in range(1, FIRST_STEPS):
        assert add(window, measured(step)) is None
    for step in (FIRST_STEPS, FIRST_STEPS + 1):
        assert add(window, measured(step)) is not None
        window.postpone()
    found = add(window, measured(FIRST_STEPS + 2))
    assert found is not None
    assert (found.first_step, found.last_step) == (1, FIRST_STEPS + 2)
    later = [step for step in range(FIRST_STEPS + 3, WINDOW_STEPS + 1) if add(window, measured(step))]
    assert later == [WINDOW_STEPS]


def test_a_few_steps_that_take_much_longer_do_not_change_the_medians() -> None:
    window = TrailingWindow()
    due = [add(window, measured(step, 50.0 if step % 3 == 0 else 1.0, 0.1 * step)) for step in range(1, 51)]
    assert due[-1] is not None
    assert due[-1].by_kind == {CPU_STEP: 1.0}
    assert due[-1].exposed_s == 2.0
    assert due[-1].windows == Windows(backward_s=0.25, forward_s=pytest.approx(2.55))


def test_medians_are_due_after_as_many_steps_if_some_were_not_measured() -> None:
    window = TrailingWindow()
    due = [step for step in range(1, 76) if add(window, measured(step) if step % 2 else None) is not None]
    assert due == [FIRST_STEPS, WINDOW_STEPS, WINDOW_STEPS + EXAMINED_EVERY]
    unmeasured = TrailingWindow()
    assert [add(unmeasured, None) for _ in range(100)] == [None] * 100


def test_measurements_are_exchanged_as_json() -> None:
    found = WindowMeasurement(
        first_step=3,
        last_step=52,
        by_kind={CPU_STEP: 0.1, PREFETCH: 1 / 3},
        windows=Windows(backward_s=0.7, forward_s=0.9),
        exposed_s=0.4,
    )
    assert WindowMeasurement.from_json_dict(json.loads(json.dumps(found.to_json_dict()))) == found


def test_all_ranks_plan_with_the_slowest_actions_and_the_shortest_windows() -> None:
    def of_rank(cpu_s: float, prefetch_s: float, forward_s: float, backward_s: float) -> WindowMeasurement:
        return WindowMeasurement(
            first_step=1,
            last_step=50,
            by_kind={CPU_STEP: cpu_s, PREFETCH: prefetch_s},
            windows=Windows(backward_s=backward_s, forward_s=forward_s),
            exposed_s=cpu_s,
        )

    found = slowest_rank([of_rank(1.0, 4.0, 0.5, 0.2), of_rank(2.0, 3.0, 0.4, 0.3)])
    assert found == of_rank(2.0, 4.0, 0.4, 0.2)
