"""What is reported as exposed is what the computing stream stood still for because of the update, however it waited."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.prediction.timeline import Phase, PhaseSpan, Span, seconds_of
from tests.zero.virtual_forward import Durations, Iteration, VirtualTraining


def iteration_of(durations: Durations, *, ahead: int) -> Iteration:
    with VirtualTraining.of(durations, ahead=ahead) as training:
        return training.iteration()


def times_of(spans: Sequence[PhaseSpan] | Sequence[Span]) -> list[float]:
    return [time_s for span in spans for time_s in (span.start_s, span.end_s)]


def assert_in_order(phases: Sequence[PhaseSpan]) -> None:
    assert all(span.start_s <= span.end_s for span in phases)
    assert all(span.end_s <= following.start_s for span, following in pairwise(phases))


@pytest.mark.parametrize("ahead", [0, 1, 2, 4])
def test_a_wait_through_the_gathering_stream_counts_like_a_direct_one(ahead: int) -> None:
    forward_s = [0.1] * 5
    iteration = iteration_of(Durations(prefetch_s=0.3, forward_s=forward_s), ahead=ahead)
    assert iteration.elapsed_s >= 5 * 0.3
    assert seconds_of(Phase.EXPOSED, iteration.phases) == pytest.approx(iteration.elapsed_s - sum(forward_s))
    assert seconds_of(Phase.FORWARD, iteration.phases) == pytest.approx(sum(forward_s))
    assert_in_order(iteration.phases)


def test_each_wait_lies_where_the_model_stood_still() -> None:
    """Each sub-group takes 0.3 s over the link and each module 0.1 s, so that forward waits 0.2 s before each."""
    iteration = iteration_of(Durations(prefetch_s=0.3, forward_s=[0.1] * 3), ahead=1)
    waits = [span for span in iteration.phases if span.phase is Phase.EXPOSED and span.end_s > span.start_s]
    assert times_of(waits) == pytest.approx([0.0, 0.3, 0.4, 0.6, 0.7, 0.9])


def test_an_all_gather_is_no_part_of_an_update() -> None:
    """The update is over when the second all-gather begins: the rest of the standstill is the all-gathers' alone."""
    durations = Durations(prefetch_s=0.1, all_gather_s=1.0, forward_s=[0.01] * 4)
    iteration = iteration_of(durations, ahead=1)
    assert iteration.all_gather_standstill_s > 3.9
    exposed_s = seconds_of(Phase.EXPOSED, iteration.phases)
    assert exposed_s == pytest.approx(0.1), "only the first module's parameters were waited for"


def test_a_forward_without_an_update_measures_nothing() -> None:
    with VirtualTraining.of(Durations(all_gather_s=1.0, forward_s=[0.01] * 4), ahead=2) as training:
        iteration = training.iteration(updates=False)
        assert iteration.all_gather_standstill_s > 3.9
        assert training.exposure.count == 0
        assert training.reported == []


def test_what_the_gathering_stream_waits_for_while_the_model_computes_is_hidden() -> None:
    iteration = iteration_of(Durations(prefetch_s=0.3, forward_s=[1.0] * 4), ahead=1)
    assert seconds_of(Phase.EXPOSED, iteration.phases) == pytest.approx(0.3)  # the first module's
    assert seconds_of(Phase.FORWARD, iteration.phases) == pytest.approx(4.0)


def test_waits_of_one_update_do_not_count_in_the_next() -> None:
    with VirtualTraining.of(Durations(prefetch_s=0.3, forward_s=[0.1] * 5), ahead=1) as training:
        iterations = [training.iteration() for _ in range(3)]
    first, *others = [[(span.end_s - span.start_s) for span in iteration.phases] for iteration in iterations]
    assert all(other == pytest.approx(first) for other in others)


def test_an_update_that_is_reported_beside_the_next_one_has_the_same_times() -> None:
    """Each iteration's copies take longer than the last one's: events of another update have other times."""
    durations = Durations(prefetch_s=0.3, flush_s=0.2, forward_s=[0.1] * 5)
    reported = []
    for at_once in (True, False):
        with VirtualTraining.of(durations, ahead=1) as training:
            for number in range(4):
                training.iteration(reports=at_once, slower=1 + number / 10)
            reported.append(training.reported[:3])
    at_once, beside_the_next = reported
    assert len(at_once) == len(beside_the_next) == 3
    for (phases, timeline), (late_phases, late_timeline) in zip(at_once, beside_the_next, strict=True):
        assert times_of(late_phases) == pytest.approx(times_of(phases))
        assert times_of(late_timeline.spans) == pytest.approx(times_of(timeline.spans))
    first, second, _ = at_once
    assert times_of(first[0]) != pytest.approx(times_of(second[0]))
    assert times_of(first[1].spans) != pytest.approx(times_of(second[1].spans))


def test_an_update_that_a_failed_step_did_not_report_is_reported_at_the_end() -> None:
    with VirtualTraining.of(Durations(prefetch_s=0.3, forward_s=[0.1] * 3), ahead=1) as training:
        training.iteration(reports=False)
        training.fails_after_update()
        assert len(training.reported) == 2
        training.fails_after_update()
        assert len(training.reported) == 3, "each once"


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
def test_an_iteration_is_forward_exposed_update_and_all_gathers(
    durations: Durations, ahead: int, num_slots: int, one_by_one: bool
) -> None:
    """The computing stream computes, waits for an all-gather that runs, or waits for the update: there is no more."""
    with VirtualTraining.of(durations, ahead=ahead, num_slots=num_slots, one_by_one=one_by_one) as training:
        iteration = training.iteration()
        count = training.exposure.count
    assert_in_order(iteration.phases)
    assert [span.phase for span in iteration.phases].count(Phase.EXPOSED) == count
    exposed_s = seconds_of(Phase.EXPOSED, iteration.phases)
    expected_s = iteration.elapsed_s - sum(durations.forward_s) - iteration.all_gather_standstill_s
    assert exposed_s == pytest.approx(expected_s, abs=1e-9)
