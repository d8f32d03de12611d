"""Run the optimizer update of each step, let forward and backward wait for it, and agree how it ended.

The life of an update, as ``UpdatePhase``::

    IDLE --run--> DEFERRED --wait_on_stream--> FINISHED --synchronize_ranks--> IDLE, or FAILED on every rank

A deferred update has published the persistent unit when ``run`` returns, and updates the others during the next
forward. Any other update goes through all phases in ``run``, which is a collective then. ``synchronize_ranks``, the
other collective, is for the next ``step()``, a new engine, checkpoints and gathers outside forward. It may also follow
DEFERRED directly. A load that has restored all states calls ``clear_failure``: FAILED becomes IDLE.

The phase is the same on every rank, because only calls that every rank makes at the same point change it. ``wait``,
which a reader of parameters or states may call on one rank alone, does not. How far a rank's own part is, and whether
it has failed, also between two updates, differs. So the ranks synchronize before each step and each collective use of
the states.

An exception that a signal handler raises, such as ``KeyboardInterrupt``, may end each of these calls. It is no failure:
the update stays in flight, and the next call ends it (*Interrupts* in ``docs/dev/design.md``). The phase changes only
after its wait. If the interrupt ends ``run``, the update has started as a whole or not at all, and is deferred.
"""

from __future__ import annotations

import atexit
import enum
import os
import weakref
from collections.abc import Callable, Sequence

from deep_opt_states import log
from deep_opt_states.device.kernels.adam import AdamStep
from deep_opt_states.runtime.failure import UpdateFailed
from deep_opt_states.runtime.lanes import Waiter
from deep_opt_states.runtime.worker import EXIT_TIMEOUT_S
from deep_opt_states.zero.internals.agreement import RanksDisagree, StepAgreement
from deep_opt_states.zero.step.exposure import OnFinished
from deep_opt_states.zero.step.running_plan import RunningPlan
from deep_opt_states.zero.step.unit_waits import UnitWaits


class UpdatePhase(enum.Enum):
    """The phase of the last update; the same on every rank."""

    IDLE = "idle"
    """No update is in flight, and every rank knows that the last one succeeded."""
    DEFERRED = "deferred"
    """The update may be in flight on some rank, even if this rank's part is done."""
    FINISHED = "finished"
    """Every rank's stream waits for its own part. No rank knows yet whether another rank's part failed."""
    FAILED = "failed"
    """The update failed on some rank, and every rank knows. Nothing is updated before the states are restored."""


class Update:
    """The updates of one engine, with the phase of the last one.

    ``on_finished`` is called once for each update that did not fail and whose waits were not interrupted. A rank whose
    part fails still takes part in the collectives of forward, in which the other ranks wait; ``synchronize_ranks`` then
    stops all ranks. A failure that no later call can raise is logged at exit.
    """

    def __init__(self, running: RunningPlan, *, defers: bool, on_finished: OnFinished) -> None:
        self._executor, self._exposure, self._windows = running.executor, running.exposure, running.windows
        self._may_defer, self._on_finished = defers, on_finished
        self._agreement = StepAgreement()
        self.unit_waits = UnitWaits(running)
        self.memory_is_short = self.memory_is_short_anywhere = False
        """Whether accelerator memory is short on this rank now, and was on any rank when the ranks last agreed."""
        self.refusal: Exception | None = None
        self._phase = UpdatePhase.IDLE
        self._raised: BaseException | None = None
        """The failure that was raised or logged, and is not logged again at the end of the process."""
        _ALIVE.add(self)

    @property
    def is_deferred(self) -> bool:
        return self._phase is UpdatePhase.DEFERRED

    @property
    def ranks_agree(self) -> bool:
        """Return whether every rank knows how the last update ended; the same on every rank."""
        return self._phase in (UpdatePhase.IDLE, UpdatePhase.FAILED)

    @property
    def failed(self) -> bool:
        """Return whether an update has failed, as far as this rank knows; other ranks may not know it yet."""
        return self._executor.failure is not None

    # Start an update

    def prefetch(self) -> None:
        """Start to copy the states that the next update needs first into the slots that are free."""
        # Backward calls this for each bucket, and a section takes tens of microseconds.
        # Where windows are measured, the copies would slow down backward.
        if self._exposure.mark_prefetch() and not self._windows.is_measuring:
            self._executor.prefetch()

    def run(self, steps: Sequence[AdamStep], prepare: Callable[[], object] = lambda: None) -> None:
        """Start the update, with one entry of ``steps`` per sub-group; ``prepare`` gives each unit its gradients.

        Unless it is deferred, end it, and raise ``UpdateFailed`` on every rank if it fails on any.
        """
        defers = self._may_defer and not self._windows.is_measuring
        self._exposure.begin_update()
        self.unit_waits.start()
        self._phase = UpdatePhase.DEFERRED
        with self._exposure.waits.direct():
            self._executor.begin(steps, prepare)
            if defers:
                self.unit_waits.publish_persistent_unit()
            else:
                self._executor.end()
        if not defers:
            self._record_end()
            self.synchronize_ranks()
            # Before the host gathers, issues and reports: a deferred update runs during all of that.
            self._windows.read_forward()
            self._windows.forward_starts()

    def skip(self) -> None:
        """Report the last update, in a step that DeepSpeed skips. Prefetched states remain valid."""
        self._exposure.forget_prefetch()
        self.report()

    def advance(self) -> None:
        """Enqueue the remaining actions."""
        if self._executor.may_advance:
            # Where the accelerator is the CPU, an action runs while it is issued, and the model waits for it.
            with self._exposure.waits.direct():
                self._executor.advance()

    # End and report an update

    def wait_on_stream(self) -> None:
        """Make the current stream wait, on every rank, for the gradients and parameters that backward uses."""
        # States may still be copied to host memory during backward.
        if self.is_deferred:
            self._end(Waiter.STREAM)
            self.unit_waits.request_all()
            self._phase = UpdatePhase.FINISHED

    def wait(self, *, states: bool = False) -> None:
        """Block until this rank's part is done, with ``states`` also until all states in host memory are up to date."""
        self._end(Waiter.HOST)
        # Only a stream may have waited in an earlier call.
        self._executor.end()
        if states:
            self._windows.disturb()
            self._executor.sync_states_to_host()

    def synchronize_ranks(self, *, raise_failure: bool = True, flushed: bool = True, states: bool = False) -> None:
        """Wait for the update, and let every rank know whether it failed on any. This is a collective over all ranks.

        Raise ``UpdateFailed`` if it failed and ``raise_failure``. Without ``flushed``, wait only as ``wait_on_stream``.
        With ``states``, bring those in host memory up to date before the ranks agree.
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
        """Wait for the update, log a failure that was not raised, and report updates that were not."""
        self.wait()
        self.log_unraised_failure()
        self.report()

    def _end(self, waiting: Waiter) -> None:
        if self._executor.pending:
            with self._exposure.waits.direct():
                self._executor.end(waiting)
            self._record_end()

    def report(self) -> None:
        """Report the previous update and the last one, if it is over, once each. The host waits for their events."""
        self.report_previous()
        self._exposure.waits.report(self._on_finished)

    def report_previous(self) -> None:
        """Report the update before the last one, which may be in flight."""
        self._exposure.report_previous(self._on_finished)

    def _record_end(self) -> None:
        self._exposure.waits.read_timeline = None if self.failed else self._executor.timeline_reader()

    # Failures

    def raise_if_failed(self) -> None:
        """Raise ``UpdateFailed`` if the states are inconsistent, as far as this rank knows."""
        if self._executor.failure is not None:
            self._raised = self._executor.failure
            raise UpdateFailed.because_of(self._executor.failure)

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
            log.error(UpdateFailed.because_of(self._executor.failure))

    def clear_failure(self) -> None:
        """Allow updates again. The caller has restored every state from a checkpoint."""
        if self._phase is UpdatePhase.FAILED:
            self._phase = UpdatePhase.IDLE
        # The traceback of the failure refers to the slots and gradients of its update, which may be freed later.
        self._raised = None
        # Prefetched states are stale.
        self._exposure.forget_prefetch()
        self._executor.clear_failure()


_ALIVE: weakref.WeakSet[Update] = weakref.WeakSet()
# A forked child has no worker thread. It would wait forever for the actions of its parent's worker, and then report.
os.register_at_fork(after_in_child=_ALIVE.clear)


@atexit.register
def _log_unraised_failures() -> None:
    for update in _ALIVE:
        update.log_unraised_failure()
