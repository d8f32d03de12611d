"""The reported exposed time is the time for which the computing stream waits for the update, however it waits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.prediction.timeline import Phase, PhaseSpan, Span, seconds_of
from tests.zero.monitoring.virtual_forward import Durations, Iteration, VirtualTraining


def run_iteration(durations: Durations, *, ahead: int) -> Iteration:
    with VirtualTraining.open(durations, ahead=ahead) as training:
        return training.iteration()


def start_and_end_times(spans: Sequence[PhaseSpan] | Sequence[Span]) -> list[float]:
    return [time_s for span in spans for time_s in (span.start_s, span.end_s)]


def assert_in_order(phases: Sequence[PhaseSpan]) -> None:
    assert all(span.start_s <= span.end_s for span in phases)
    assert all(span.end_s <= following.start_s for span, following in pairwise(phases))


@pytest.mark.parametrize("ahead", [0, 1, 2, 4])
def test_a_wait_through_the_gathering_stream_counts_like_a_direct_one(ahead: int) -> None:
    forward_s = [0.1] * 5
    iteration = run_iteration(Durations(prefetch_s=0.3, forward_s=forward_s), ahead=ahead)
    assert iteration.elapsed_s >= 5 * 0.3
    assert seconds_of(Phase.EXPOSED, iteration.phases) == pytest.approx(iteration.elapsed_s - sum(forward_s))
    assert seconds_of(Phase.FORWARD, iteration.phases) == pytest.approx(sum(forward_s))
    assert_in_order(iteration.phases)


def test_each_exposed_span_lies_where_the_model_waited() -> None:
    """Check the spans: a unit takes 0.3 s over the link and a module 0.1 s, so forward waits 0.2 s before each."""
    iteration = run_iteration(Durations(prefetch_s=0.3, forward_s=[0.1] * 3), ahead=1)
    waits = [span for span in iteration.phases if span.phase is Phase.EXPOSED and span.end_s > span.start_s]
    assert start_and_end_times(waits) == pytest.approx([0.0, 0.3, 0.4, 0.6, 0.7, 0.9])


def test_waits_for_all_gathers_are_not_exposed_update() -> None:
    """Check an update that is over when the second all-gather begins: the all-gathers cause all later waits."""
    durations = Durations(prefetch_s=0.1, all_gather_s=1.0, forward_s=[0.01] * 4)
    iteration = run_iteration(durations, ahead=1)
    assert iteration.all_gather_standstill_s > 3.9
    exposed_s = seconds_of(Phase.EXPOSED, iteration.phases)
    assert exposed_s == pytest.approx(0.1), "forward waited for the update of the first module's parameters only"


def test_a_forward_without_an_update_reports_no_exposed_time() -> None:
    with VirtualTraining.open(Durations(all_gather_s=1.0, forward_s=[0.01] * 4), ahead=2) as training:
        iteration = training.iteration(updates=False)
        assert iteration.all_gather_standstill_s > 3.9
        assert training.exposure.waits.count == 0
        assert training.reported == []


def test_waits_of_the_gathering_stream_are_hidden_while_the_model_computes() -> None:
    iteration = run_iteration(Durations(prefetch_s=0.3, forward_s=[1.0] * 4), ahead=1)
    assert seconds_of(Phase.EXPOSED, iteration.phases) == pytest.approx(0.3)  # for the first module's parameters
    assert seconds_of(Phase.FORWARD, iteration.phases) == pytest.approx(4.0)


def test_waits_of_one_update_do_not_count_in_the_next() -> None:
    with VirtualTraining.open(Durations(prefetch_s=0.3, forward_s=[0.1] * 5), ahead=1) as training:
        iterations = [training.iteration() for _ in range(3)]
    first, *others = [[(span.end_s - span.start_s) for span in iteration.phases] for iteration in iterations]
    assert all(other == pytest.approx(first) for other in others)


def test_an_update_that_is_reported_during_the_next_one_has_the_same_times() -> None:
    """Check with copies that become slower in each iteration, so that events of another update have other times.

    The flushes end within forward: a report at once would wait for those in flight, and delay the next update.
    """
    durations = Durations(prefetch_s=0.3, flush_s=0.05, forward_s=[0.1] * 5)
    reported = []
    for at_once in (True, False):
        with VirtualTraining.open(durations, ahead=1) as training:
            for number in range(4):
                training.iteration(reports=at_once, slower=1 + number / 10)
            reported.append(training.reported[:3])
    at_once, during_the_next = reported
    assert len(at_once) == len(during_the_next) == 3
    for (phases, timeline), (late_phases, late_timeline) in zip(at_once, during_the_next, strict=True):
        assert start_and_end_times(late_phases) == pytest.approx(start_and_end_times(phases))
        assert start_and_end_times(late_timeline.spans) == pytest.approx(start_and_end_times(timeline.spans))
    first, second, _ = at_once
    assert start_and_end_times(first[0]) != pytest.approx(start_and_end_times(second[0]))
    assert start_and_end_times(first[1].spans) != pytest.approx(start_and_end_times(second[1].spans))


def test_an_update_that_a_failed_step_did_not_report_is_reported_at_the_end() -> None:
    with VirtualTraining.open(Durations(prefetch_s=0.3, forward_s=[0.1] * 3), ahead=1) as training:
        training.iteration(reports=False)
        training.fail_after_update()
        assert len(training.reported) == 2
        training.fail_after_update()
        assert len(training.reported) == 3, "each update is reported once"


def test_the_backward_before_an_update_begins_after_a_skipped_step() -> None:
    with VirtualTraining.open(Durations(prefetch_s=0.3, forward_s=[0.1] * 3), ahead=1) as training:
        training.iteration()
        training.backward(skips=True)
        assert training.iteration(updates=False).elapsed_s >= 0.3
        training.backward()
        assert seconds_of(Phase.BACKWARD, training.iteration().phases) == pytest.approx(0.0)


durations_s = st.integers(0, 10).map(lambda tenths: tenths / 10)


@given(
    durations=st.builds(
        Durations,
        forward_s=st.lists(durations_s, min_size=1, max_size=6),
        prefetch_s=durations_s,
        flush_s=durations_s,
        gpu_step_s=durations_s,
        all_gather_s=durations_s,
    ),
    ahead=st.integers(0, 6),
    num_slots=st.integers(1, 6),
    one_by_one=st.booleans(),
)
def test_an_iteration_consists_of_forward_exposed_update_and_waits_for_all_gathers(
    durations: Durations, ahead: int, num_slots: int, one_by_one: bool
) -> None:
    """Check that at any time the computing stream computes, waits for a running all-gather, or waits for the update."""
    with VirtualTraining.open(durations, ahead=ahead, num_slots=num_slots, one_by_one=one_by_one) as training:
        iteration = training.iteration()
        count = training.exposure.waits.count
    assert_in_order(iteration.phases)
    assert [span.phase for span in iteration.phases].count(Phase.EXPOSED) == count
    exposed_s = seconds_of(Phase.EXPOSED, iteration.phases)
    expected_s = iteration.elapsed_s - sum(durations.forward_s) - iteration.all_gather_standstill_s
    assert exposed_s == pytest.approx(expected_s, abs=1e-9)
