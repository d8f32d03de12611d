"""An update from the moment it is decided to its end, maybe in the next forward; all ranks agree how it ended."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from deep_opt_states.device.kernels.adam import AdamStep
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.exposure import Exposure, Waits
from deep_opt_states.zero.internals.agreement import FailureAgreement
from deep_opt_states.zero.internals.log import say_error
from perf_model.prediction.timeline import PhaseSpan, Timeline

Finished = Callable[[tuple[PhaseSpan, ...], Callable[[], Timeline]], None]


@dataclass(frozen=True)
class Times:
    """The measured times of one update, readable until the second update after it is prefetched or begins."""

    waits: Waits
    read_timeline: Callable[[], Timeline]

    def give(self, finished: Finished) -> None:
        finished(self.waits.phases(), self.read_timeline)


# Two of these, of the worker and of the update, are within what launchers wait before they kill: 10 s.
_EXIT_TIMEOUT_S = 4.0


class Update:
    """``defers``: ``run`` returns when the first parts are updated, and the rest goes on until ``finish``.

    ``finished`` is called once for each update that did not fail, in ``report_previous``, ``report`` or ``close``, with
    when the model waited for it and when it went on, and what gives its timeline.

    A rank whose part fails goes on with its collectives, which the others wait in; ``settle`` tells all ranks. A
    failure after which nothing is called that could raise it is logged when the process ends.
    """

    def __init__(self, executor: Executor, exposure: Exposure, *, defers: bool, finished: Finished) -> None:
        self._executor = executor
        self._exposure = exposure
        self._defers = defers
        self._finished = finished
        self._failures = FailureAgreement()
        self._waited_for: set[int] = set()
        """Sub-groups whose parameters the computing stream has waited for."""
        self._gathered: set[int] = set()
        """Sub-groups that only the gathering stream has waited for."""
        self._unreported: Times | None = None
        self._previous_unreported: Times | None = None
        self.settled = True
        """Whether all ranks know how the last update ended; the same on every rank."""
        self.goes_on = False
        """Whether one may be under way on some rank: the same on all, also where this one has waited for its end."""
        self._raised: BaseException | None = None
        """The failure that the caller knows."""
        _ALIVE.add(self)

    def run(self, steps: Sequence[AdamStep]) -> None:
        """Gradients, states and parameters belong to the update from now on. Raises ``UpdateFailed`` at the end."""
        self._previous_unreported, self._unreported = self._unreported, None
        self._exposure.begins()
        self._waited_for.clear()
        self._gathered.clear()
        self.goes_on = self._defers
        self.settled = False
        try:
            with self._exposure.waits.direct():
                self._executor.begin(steps)
                if not self._defers:
                    self._executor.finish()
        except BaseException:
            if not self._defers:
                # An interrupt, too, is told to the other ranks, which are here, and then raised.
                self.settle()
            self._raised = self._executor.failure
            raise
        self._keep_times()
        if not self._defers:
            self.settle()
            self.refuse_torn()

    def prefetch(self) -> None:
        """Of the next update, what has a slot."""
        self._exposure.prefetches()
        self._executor.prefetch()

    def wait_for(self, sub_groups: Iterable[int]) -> None:
        """The current stream, which computes, needs their parameters next, or some of the first parts."""
        self._executor.publish_first_parts()
        for sub_group in sub_groups:
            self._executor.ask_for(sub_group)
            if sub_group not in self._waited_for:
                self._waited_for.add(sub_group)
                with self._exposure.waits.direct():
                    self._executor.publish(sub_group)

    def publish(self, sub_groups: Iterable[int]) -> None:
        """The current stream, beside the one that computes, is about to read their parameters, or the first parts'."""
        self._executor.publish_first_parts()
        for sub_group in sub_groups:
            self._executor.ask_for(sub_group)
            if not self._executor.pending or sub_group in self._waited_for or sub_group in self._gathered:
                # One of the streams has waited for it, or will have when that matters: there is nothing to measure.
                self._executor.publish(sub_group)
            else:
                self._gathered.add(sub_group)
                with self._exposure.waits.on_gathering_stream():
                    self._executor.publish(sub_group)

    def gathers_awaited(self) -> AbstractContextManager[None]:
        """Return a context in which the stream that computes, which is current, waits for the one that gathers."""
        return self._exposure.waits.for_gathering_stream()

    def advance(self) -> None:
        if self._executor.may_advance():
            # Where the accelerator is the CPU, what is issued is done here, and the model waits for it.
            with self._exposure.waits.direct():
                self._executor.advance()

    def may_block(self, sub_group: int) -> bool:
        """The same on every rank: whether gathering the sub-group's parameters now could make a host wait."""
        return self.goes_on and self._executor.may_block(sub_group)

    def end(self) -> None:
        """Every rank is here: forward is over, and with it what may go on beside it."""
        self.goes_on = False
        self.finish()

    def finish(self) -> None:
        """Returns when all is done: what belonged to the update is the caller's again."""
        if self._executor.pending:
            with self._exposure.waits.direct():
                self._executor.finish()
            self._keep_times()

    def drain(self) -> None:
        """For a caller that may write to the states: all is done, and what was prefetched of them is forgotten."""
        self.finish()
        self._executor.discard()

    def settle(self) -> None:
        """Finishes. A collective, if an update has run since the last: every rank knows if it has failed on any."""
        self.end()
        if not self.settled:
            self.settled = True
            self._failures.share(self._executor)

    def refuse_torn(self) -> None:
        """Raises ``UpdateFailed`` if the states are torn, as far as this rank knows."""
        if self._executor.failure is not None:
            self._raised = self._executor.failure
            raise self._executor.torn()

    def say_unraised(self) -> None:
        """For the end, when nothing will raise it; this rank's failure, if it shows within seconds."""
        if self._executor.failed_within(_EXIT_TIMEOUT_S) and self._raised is not self._executor.failure:
            self._raised = self._executor.failure
            say_error(self._executor.torn())

    @property
    def failed(self) -> bool:
        return self._executor.failure is not None

    def forget_failure(self) -> None:
        """All states were restored from a checkpoint."""
        self._executor.forget_failure()

    def close(self) -> None:
        self.finish()
        self.say_unraised()
        self.report()

    def report(self) -> None:
        """Report the last update, if it is over and was not reported, and before it one that a failed step left.

        The host waits for the device to reach the last event that measures it: call this when it has.
        """
        self.report_previous()
        if self._unreported is not None and not self._executor.pending:
            times, self._unreported = self._unreported, None
            times.give(self._finished)

    def report_previous(self) -> None:
        """Report the update before the one that ``run`` was called for, while that goes on.

        Call this before the next one is prefetched, which takes the events.
        """
        if self._previous_unreported is not None:
            times, self._previous_unreported = self._previous_unreported, None
            times.give(self._finished)

    def _keep_times(self) -> None:
        if self._executor.failure is None:
            self._unreported = Times(self._exposure.waits, self._executor.timeline_reader())
        else:
            self._unreported = None


_ALIVE: weakref.WeakSet[Update] = weakref.WeakSet()
# A forked child has no worker thread: it would wait in vain for what its parent's worker has begun, and then report.
os.register_at_fork(after_in_child=_ALIVE.clear)


@atexit.register
def _say_what_was_not_raised() -> None:
    for update in _ALIVE:
        update.say_unraised()
