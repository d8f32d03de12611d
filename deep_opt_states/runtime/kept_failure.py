"""Keep the failure of an update on one rank until all ranks can raise it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress

from deep_opt_states.runtime.issuer import Issuer
from deep_opt_states.runtime.lanes import LaneStreams


class KeptFailure:
    """The ``error`` that left the states inconsistent, until ``clear``; ``discard`` discards speculated steps."""

    def __init__(self, issuer: Issuer, lanes: LaneStreams, discard: Callable[[], None]) -> None:
        self._issuer, self._lanes, self._discard = issuer, lanes, discard
        self.error: BaseException | None = None

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Keep an exception that is raised inside, and stop the update. Sections call this."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 (kept until it is raised on all ranks)
            self._issuer.stop.set()
            # Immediately: if the next lines never return, the end of the process still reports it.
            self.error = error
            self.error = self._issuer.first_error(error)
            # Operations in flight still write to states, into which a checkpoint is loaded, and to slots, which are
            # freed. A further error is ignored.
            with suppress(Exception):
                self._lanes.drain()
            self._discard_next_update()

    def wait_for_threads(self, timeout_s: float) -> None:
        """Keep the failure of a thread, after waiting at most ``timeout_s`` for its part of the update."""
        done, _ = wait(self._issuer.on_cpu.values(), timeout_s)
        found = next(filter(None, (future.exception() for future in done)), None)
        # A signal handler may have kept another one meanwhile.
        if self.error is None and found is not None:
            self.error = found

    def clear(self) -> None:
        """Allow updates again: every state was restored, and nothing is in flight."""
        self.error = None
        self._issuer.stop.clear()
        self._issuer.forget_flushes()
        self._issuer.on_cpu = {}
        self._discard_next_update()

    def _discard_next_update(self) -> None:
        self._issuer.forget_prefetches()
        with suppress(Exception):
            self._discard()
