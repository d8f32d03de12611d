"""Run the optimizer update of each step, let readers and backward wait for it, and agree how it ended.

The life of an update, as ``UpdatePhase``::

    IDLE --run--> DEFERRED --wait_on_stream--> FINISHED --synchronize_ranks--> IDLE, or FAILED on every rank

If the update may be deferred, the persistent unit is updated when ``run`` returns, and the others are updated while the
next forward runs. If it must end within ``step()``, ``run`` goes through all of these phases. ``synchronize_ranks`` may
also follow ``DEFERRED`` directly, for example before a checkpoint is saved.

========================= ========================================== ================= =================================
Call                      Caller                                     Collective        Afterwards
========================= ========================================== ================= =================================
``prefetch``              backward, at an accumulation boundary      no                the slots hold the states that
                                                                                       the next update needs first
``run``                   ``step()``, at its last sub-group          unless deferred   DEFERRED; if not deferred: IDLE,
                                                                                       or it raises on every rank
``wait_for``, ``publish`` forward, before it gathers or reads        no                the current stream waits for the
                          parameters                                                   parameters of the units
``advance``               ``step()`` and forward                     no                more actions are enqueued
``wait_on_stream``        backward, on every rank                    no                DEFERRED becomes FINISHED; the
                                                                                       current stream waits for all but
                                                                                       the flushes
``wait``                  every reader of parameters or states,      no                this rank's part is done; the
                          also on one rank alone                                       phase is as before
``synchronize_ranks``     on every rank: the next ``step()``, a new  yes               IDLE; FAILED on every rank if the
                          engine, checkpoints, gathers outside                         update failed on any
                          forward
``raise_if_failed``       every user of the states                   no                the states are consistent, as far
                                                                                       as this rank knows
``clear_failure``         a load that has restored all states        no                FAILED becomes IDLE
``close``                 ``destroy()``                              no                all is done and reported; a
                                                                                       failure that was not raised is
                                                                                       logged
========================= ========================================== ================= =================================

The phase is the same on every rank, because only calls that every rank makes at the same point change it. How far a
rank's own part is, and whether it has failed, differs between ranks until they synchronize. A rank may also fail
between two updates, alone and in any phase: a prefetch or a copy of resident states to host memory fails. So the ranks
synchronize before each step and each collective use of the states, even if they have agreed on the last update.
Prefetching is no phase of its own: it happens in backward, and the next step lets the ranks agree whether it has
failed.

An exception that a signal handler raises, such as ``KeyboardInterrupt``, may end each of these calls. It is no failure:
the update stays in flight, and the next call ends it (*Interrupts* in ``Executor``). The phase changes only after the
wait that it stands for. If the interrupt ends ``run``, the update has begun as a whole or not at all, and then it is
deferred. The times of an update are not reported if a wait for it was interrupted.
"""

from __future__ import annotations

import atexit
import enum
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from deep_opt_states.device.kernels.adam import AdamStep
from deep_opt_states.runtime.executor import Waiter
from deep_opt_states.runtime.worker import EXIT_TIMEOUT_S
from deep_opt_states.zero.internals.agreement import RanksDisagree, StepAgreement
from deep_opt_states.zero.internals.log import log_error
from deep_opt_states.zero.step.exposure import UpdateWaits
from deep_opt_states.zero.step.running_plan import RunningPlan
from perf_model.prediction.timeline import PhaseSpan, Timeline
from perf_model.schedule.action import Lane

OnFinished = Callable[[tuple[PhaseSpan, ...], Callable[[], Timeline]], None]


class UpdatePhase(enum.Enum):
    """The phase of the last update; the same on every rank."""

    IDLE = "idle"
    """No update is in flight, and every rank knows that the last one succeeded."""
    DEFERRED = "deferred"
    """The update may be in flight on some rank, concurrently with forward, even if this rank's part is done."""
    FINISHED = "finished"
    """Every rank's stream waits for its own part, whose flushes may be in flight; whether another rank's part failed is
    not known yet."""
    FAILED = "failed"
    """The update failed on some rank, and every rank knows. Nothing is updated before the states are restored."""


@dataclass(frozen=True)
class MeasuredTimes:
    """The measured times of one update, readable until the second update after it is prefetched or begins."""

    waits: UpdateWaits
    read_timeline: Callable[[], Timeline]

    def pass_to(self, on_finished: OnFinished) -> None:
        """Call ``on_finished`` with them, unless a wait for the update was interrupted: they are not known then.

        The host waits for the events that they are read from.
        """
        if self.waits.are_complete:
            on_finished(self.waits.phases(), self.read_timeline)


class Update:
    """The updates of one engine, one after the other, with the phase that the last of them is in.

    ``defers``: an update may continue while the next forward runs; otherwise ``run`` ends it. It is the same on every
    rank.

    ``on_finished`` is called once for each update that did not fail and whose times are known, by ``report_previous``,
    ``report`` or ``close``. It receives the spans in which the model waited for the update and in which both ran, and a
    function that returns the update's timeline.

    A rank whose part fails still takes part in the collectives of forward, which the other ranks wait in;
    ``synchronize_ranks`` then stops all ranks. A failure that no later call can raise is logged when the process ends.
    """

    def __init__(
        self,
        running: RunningPlan,
        *,
        defers: bool,
        on_finished: OnFinished,
    ) -> None:
        self._running = running
        self._executor, self._exposure = running.executor, running.exposure
        self._defers = defers
        self._on_finished = on_finished
        self._agreement = StepAgreement()
        self.memory_is_short = False
        """Whether accelerator memory is short on this rank. The ranks exchange it when they synchronize."""
        self.memory_is_short_anywhere = False
        """Whether it was short on any rank when the ranks synchronized last; the same on every rank."""
        self.refusal: Exception | None = None
        """The error by which this rank refuses the next update. The ranks exchange it when they synchronize."""
        self._waited_for: set[int] = set()
        """Units whose parameters the computing stream has waited for."""
        self._gathered: set[int] = set()
        """Units that only the gathering stream has waited for."""
        self._requested = 0
        """The position in the schedule of the plan before which every rank has requested each PUBLISH."""
        self._unreported: MeasuredTimes | None = None
        """The times of the last update, unless it failed or was reported."""
        self._previous_unreported: MeasuredTimes | None = None
        """The times of the update before that."""
        self._phase = UpdatePhase.IDLE
        self._raised: BaseException | None = None
        """The failure that was raised or logged here; it is not logged again at the end of the process."""
        _ALIVE.add(self)

    @property
    def is_deferred(self) -> bool:
        """Return whether an update may be in flight on some rank; the same on every rank."""
        return self._phase is UpdatePhase.DEFERRED

    @property
    def ranks_agree(self) -> bool:
        """Return whether every rank knows how the last update ended; the same on every rank."""
        return self._phase in (UpdatePhase.IDLE, UpdatePhase.FAILED)

    @property
    def failed(self) -> bool:
        """Return whether an update has failed, as far as this rank knows; other ranks may not know it yet."""
        return self._executor.failure is not None

    # Begin an update

    def prefetch(self) -> None:
        """Begin to copy the states that the next update needs first into the slots that are free."""
        # The events that it is read from are recorded again. It is reported already, unless the step was interrupted.
        self._previous_unreported = None
        self._exposure.mark_prefetch()
        self._executor.prefetch()

    def run(self, steps: Sequence[AdamStep], prepare: Callable[[], object] = lambda: None) -> None:
        """Begin the update, with one entry of ``steps`` per sub-group, and finish it unless it is deferred.

        ``prepare`` gives each unit its gradients; if it raises, the update has failed on this rank. Gradients,
        states and parameters belong to the update from now on, until ``wait`` returns. Raise ``UpdateFailed`` on every
        rank if an update that is not deferred fails on any.
        """
        self._previous_unreported, self._unreported = self._unreported, None
        self._exposure.begin_update()
        self._waited_for.clear()
        self._gathered.clear()
        self._requested = 0
        self._phase = UpdatePhase.DEFERRED
        with self._exposure.waits.direct():
            self._executor.begin(steps, prepare)
            if self._defers:
                self._publish_persistent_unit()
            else:
                self._executor.end()
        self._record_times()
        if not self._defers:
            self.synchronize_ranks()

    def skip(self) -> None:
        """Report the last update, in a step that DeepSpeed skips. What was prefetched for it remains valid."""
        self._exposure.forget_prefetch()
        self.report()

    # While forward runs

    def wait_for(self, units: Iterable[int]) -> None:
        """Make the current stream, which computes, wait for the parameters of ``units`` and the persistent ones."""
        self._publish_persistent_unit()
        for unit in units:
            self._mark_requested(unit)
            if unit not in self._waited_for:
                with self._exposure.waits.direct():
                    self._executor.publish(unit)
                self._waited_for.add(unit)

    def publish(self, units: Iterable[int]) -> None:
        """Make the current stream, which gathers, wait for the parameters of ``units`` and the persistent ones."""
        self._publish_persistent_unit()
        for unit in units:
            self._mark_requested(unit)
            if not self._executor.pending or unit in self._waited_for or unit in self._gathered:
                # One of the two streams has waited for the unit already: no time is lost here.
                self._executor.publish(unit)
            else:
                with self._exposure.waits.on_gathering_stream():
                    self._executor.publish(unit)
                self._gathered.add(unit)

    def gathers_awaited(self) -> AbstractContextManager[None]:
        """Return a context in which the current stream, which computes, waits for the stream that gathers."""
        return self._exposure.waits.for_gathering_stream()

    def advance(self) -> None:
        """Enqueue the remaining actions."""
        if self._executor.may_advance:
            # Where the accelerator is the CPU, an action runs while it is issued, and the model waits for it.
            with self._exposure.waits.direct():
                self._executor.advance()

    def may_block(self, unit: int) -> bool:
        """Return whether gathering the unit's parameters now could make a host wait; the same on every rank.

        That is so for a CPU unit unless every rank has requested it, or a unit that the worker updates after it. It
        depends only on the plan, and on the units that forward has requested. How far the worker of this rank is, a
        failure, an eviction and the number of slots do not matter.
        """
        schedule = self._running.plan.schedule
        position = schedule.publishing[unit]
        return self.is_deferred and schedule.actions[position].lane is Lane.PUBLISH and position >= self._requested

    def _mark_requested(self, unit: int) -> None:
        """Record that every rank is about to publish the parameters of ``unit``."""
        schedule = self._running.plan.schedule
        position = schedule.publishing[unit]
        if schedule.actions[position].lane is Lane.PUBLISH:
            self._requested = max(self._requested, position + 1)

    def _publish_persistent_unit(self) -> None:
        """Make the current stream wait for the parameters that DeepSpeed keeps gathered: any module may read them."""
        unit = self._running.plan.workload.persistent_unit
        if unit is not None:
            self._executor.publish(unit)

    # End an update

    def wait_on_stream(self) -> None:
        """Make the current stream wait for everything that backward overwrites or reads: gradients and parameters.

        Every rank makes this call at the same point, so that nothing is deferred on any rank afterwards. It is no
        collective. States may still be copied to host memory, and backward overlaps with that.
        """
        if self._executor.pending:
            with self._exposure.waits.direct():
                self._executor.end(Waiter.STREAM)
            self._record_times()
        if self.is_deferred:
            self._phase = UpdatePhase.FINISHED

    def wait(self, *, states: bool = False) -> None:
        """Block until this rank's part is done: gradients, states and parameters are the caller's again.

        ``states``: the caller reads or writes optimizer states, too. Those in host memory are then the newest, and the
        next update copies them to the accelerator again.
        """
        if self._executor.pending:
            with self._exposure.waits.direct():
                self._executor.end()
            self._record_times()
        self._executor.end()
        if states:
            self._executor.sync_states_to_host()

    def synchronize_ranks(self, *, raise_failure: bool = True, flushed: bool = True, states: bool = False) -> None:
        """Wait for the update, and let every rank know whether it failed on any. Every rank must call this.

        This is a collective over all ranks. Raise ``UpdateFailed`` if the states are inconsistent and
        ``raise_failure``. Without ``flushed``, states may still be copied to host memory afterwards, and only the
        current stream may use parameters and gradients. ``states``: the caller reads or writes optimizer states, as in
        ``wait``. If that fails, this rank fails before the ranks agree.
        """
        self.wait_on_stream()
        if flushed:
            self.wait(states=states)
        # Before the collective: a rank that is interrupted in it must not repeat it alone in its next gather.
        self._phase = UpdatePhase.IDLE
        self.memory_is_short_anywhere = self._agreement.share(
            self._executor, memory_is_short=self.memory_is_short, refuses=self.refusal is not None
        )
        if self.failed:
            self._phase = UpdatePhase.FAILED
        if raise_failure:
            self.raise_if_failed()

    def close(self) -> None:
        """Wait for the update, log a failure that was not raised, and report the updates that were not reported."""
        self.wait()
        self.log_unraised_failure()
        self.report()

    # Failures

    def raise_if_failed(self) -> None:
        """Raise ``UpdateFailed`` if the states are inconsistent, as far as this rank knows."""
        if self._executor.failure is not None:
            self._raised = self._executor.failure
            raise self._executor.inconsistent_states_error()

    def raise_if_refused(self) -> None:
        """Raise this rank's refusal, or ``RanksDisagree`` if only other ranks refuse the next update."""
        if self.refusal is not None:
            raise self.refusal
        if ranks := self._agreement.refusing_ranks:
            raise RanksDisagree(
                f"Each rank must be able to update its states, found that ranks refuse: {ranks}.\n"
                f"Remove the cause that the messages of these ranks name. Nothing was updated on any rank."
            )

    def log_unraised_failure(self) -> None:
        """Log this rank's failure if it shows within a few seconds and nothing has raised it before."""
        if self._executor.failed_within(EXIT_TIMEOUT_S) and self._raised is not self._executor.failure:
            self._raised = self._executor.failure
            log_error(self._executor.inconsistent_states_error())

    def clear_failure(self) -> None:
        """Allow updates again. The caller has restored every state from a checkpoint."""
        if self._phase is UpdatePhase.FAILED:
            self._phase = UpdatePhase.IDLE
        # The traceback of the failure refers to the slots and gradients of its update, which may be freed later.
        self._raised = None
        self._executor.clear_failure()

    # Report updates

    def report(self) -> None:
        """Report the last update once, if it is over, after the update before it if that was not reported.

        The host waits until the device has reached the last event that measures the update: call this when it has.
        """
        self.report_previous()
        if self._unreported is not None and not self._executor.pending:
            times, self._unreported = self._unreported, None
            times.pass_to(self._on_finished)

    def report_previous(self) -> None:
        """Report the update before the one that ``run`` has begun last, which may be in flight.

        Call this before the next update is prefetched: that reuses the events.
        """
        if self._previous_unreported is not None:
            times, self._previous_unreported = self._previous_unreported, None
            times.pass_to(self._on_finished)

    def _record_times(self) -> None:
        if self._executor.failure is None:
            self._unreported = MeasuredTimes(self._exposure.waits, self._executor.timeline_reader())
        else:
            self._unreported = None


_ALIVE: weakref.WeakSet[Update] = weakref.WeakSet()
# A forked child has no worker thread. It would wait forever for the actions of its parent's worker, and then report.
os.register_at_fork(after_in_child=_ALIVE.clear)


@atexit.register
def _log_unraised_failures() -> None:
    for update in _ALIVE:
        update.log_unraised_failure()
