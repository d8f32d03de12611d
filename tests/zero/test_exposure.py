"""The reported exposed time is the time for which the computing stream waits for the update, however it waits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep_opt_states.zero.step.exposure import Exposure
from perf_model.prediction.timeline import Phase, PhaseSpan, seconds_of
from tests.profiler.virtual import VirtualDevice, VirtualStream


class VirtualForward:
    """A forward in which module after module needs the parameters of one unit, which the update publishes in turn."""

    def __init__(self, forward_s: Sequence[float], publish_s: float, *, all_gather_s: float = 0.0, ahead: int = 1):
        self.forward_s, self.publish_s, self.all_gather_s, self.ahead = forward_s, publish_s, all_gather_s, ahead
        self.device = VirtualDevice()
        self.exposure = Exposure(self.device)
        self.gathering = self.device.stream()
        self.reported: list[tuple[PhaseSpan, ...]] = []

    def iteration(self, *, slower: float = 1.0, reports: bool = True) -> tuple[float, float]:
        """Return the seconds of the iteration, and those for which computing waited while an all-gather ran."""
        computing, modules = self.device.current_stream(), len(self.forward_s)
        self.device.now_s = begin_s = computing.starts_s()
        self.exposure.begin_update()
        self.exposure.waits.read_timeline = lambda: Any
        self.exposure.report_previous(self._append)
        self._gathered, self._all_gathers, self._standstill_s = 0, list[tuple[float, float]](), 0.0
        self._published = [self.device.event() for _ in self.forward_s]
        for event, at_s in zip(self._published, accumulate([self.publish_s * slower] * modules), strict=True):
            event.at_s = begin_s + at_s
        self.gathering.run(0.0)
        for index, forward_s in enumerate(self.forward_s):
            if is_partitioned := index >= self._gathered:
                with self.exposure.waits.direct():
                    computing.wait(self._published[index])
            with self.exposure.waits.for_gathering_stream():
                if is_partitioned:
                    self._gather_until(index + 1)
                self._wait_for_gathering(computing)
                self._gather_until(min(index + 1 + self.ahead, modules))
            computing.run(forward_s)
        if reports:
            self.exposure.waits.report(self._append)
        return computing.starts_s() - begin_s, self._standstill_s

    def _append(self, phases: tuple[PhaseSpan, ...], _: Any) -> None:
        self.reported.append(phases)

    def _gather_until(self, end: int) -> None:
        while self._gathered < end:
            with self.gathering.issue():
                with self.exposure.waits.on_gathering_stream():
                    self.gathering.wait(self._published[self._gathered])
                start_s = self.gathering.starts_s()
                self.gathering.run(self.all_gather_s)
            self._all_gathers.append((start_s, self.gathering.free_at_s))
            self._gathered += 1

    def _wait_for_gathering(self, computing: VirtualStream) -> None:
        begin_s = computing.starts_s()
        computing.free_at_s = end_s = max(begin_s, self.gathering.free_at_s)
        for start_s, finish_s in self._all_gathers:
            self._standstill_s += max(0.0, min(end_s, finish_s) - max(begin_s, start_s))
        self._all_gathers.clear()


def times_of(phases: Sequence[PhaseSpan]) -> list[float]:
    return [time_s for span in phases for time_s in (span.start_s, span.end_s)]


def test_each_exposed_span_lies_where_the_model_waited_also_if_it_is_reported_during_the_next_update() -> None:
    """Check a unit of 0.3 s and a module of 0.1 s, with updates that become slower, so that events have other times."""
    at_once, late = (VirtualForward([0.1] * 3, 0.3) for _ in range(2))
    for number in range(4):
        at_once.iteration(slower=1 + number / 10)
        late.iteration(slower=1 + number / 10, reports=False)
    waits = [span for span in at_once.reported[0] if span.phase is Phase.EXPOSED and span.end_s > span.start_s]
    assert times_of(waits) == pytest.approx([0.0, 0.3, 0.4, 0.6, 0.7, 0.9])
    expected = [pytest.approx(times_of(phases)) for phases in at_once.reported[:3]]
    assert [times_of(phases) for phases in late.reported] == expected
    assert times_of(late.reported[0]) != pytest.approx(times_of(late.reported[1]))


def test_the_backward_before_an_update_begins_after_a_skipped_step() -> None:
    training = VirtualForward([0.1] * 3, 0.3)
    assert training.exposure.mark_prefetch()
    assert not training.exposure.mark_prefetch()
    training.exposure.forget_prefetch()
    training.device.current_stream().run(1.0)
    assert training.exposure.mark_prefetch()
    training.device.current_stream().run(0.5)
    training.iteration()
    assert seconds_of(Phase.BACKWARD, training.reported[0]) == pytest.approx(0.5)


durations_s = st.integers(0, 10).map(lambda tenths: tenths / 10)


@given(
    forward_s=st.lists(durations_s, min_size=1, max_size=6),
    publish_s=durations_s,
    all_gather_s=durations_s,
    ahead=st.integers(0, 6),
)
def test_at_any_time_the_stream_computes_or_waits_for_an_all_gather_or_for_the_update(
    forward_s: list[float], publish_s: float, all_gather_s: float, ahead: int
) -> None:
    training = VirtualForward(forward_s, publish_s, all_gather_s=all_gather_s, ahead=ahead)
    elapsed_s, standstill_s = training.iteration()
    (phases,) = training.reported
    assert all(span.start_s <= span.end_s for span in phases)
    assert all(span.end_s <= following.start_s for span, following in pairwise(phases))
    assert [span.phase for span in phases].count(Phase.EXPOSED) == len(training.exposure.waits._waits)
    expected_s = elapsed_s - sum(forward_s) - standstill_s
    assert seconds_of(Phase.EXPOSED, phases) == pytest.approx(expected_s, abs=1e-9)
