"""Tells every outlet of each update; keeps what is compared with the prediction, and says that at the end."""

from __future__ import annotations

import atexit
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

from deep_opt_states.report.comparison import Compared, Measured, Predicted, compare, median_windows
from deep_opt_states.report.record import Progress, UpdateRecord, Work
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.timeline import PhaseSpan, Timeline

WARM_UPDATES = 2
"""The first ones touch memory and wake threads; they are not compared."""

COMPARED_UPDATES = 100
"""The last ones are kept."""


class Outlet(Protocol):
    """Where a report goes."""

    name: str
    """What switches it on, in the user's words."""

    def updated(self, record: UpdateRecord, report: UpdateReport) -> None: ...

    def close(self, report: UpdateReport) -> None:
        """Training is over; ``updated`` was not called before if nothing was updated."""


class UpdateReport:
    """``log`` prints a line; ``predict``: None predicts nothing; ``progress`` is that of the update that is told.
    ``planned`` describes the placements, for the end of the log.

    An outlet that fails is said, once, and hears no more; it must not end the training.
    """

    def __init__(
        self,
        work: Work,
        predict: Callable[[Windows], Predicted] | None,
        outlets: Sequence[Outlet],
        progress: Callable[[], Progress],
        log: Callable[[str], None],
        planned: str = "",
    ) -> None:
        self._work = work
        # A simulation; the outlets and the end ask for the same one.
        self._predict = None if predict is None else lru_cache(maxsize=1)(predict)
        self._outlets = list(outlets)
        self._progress = progress
        self._log = log
        self._planned = planned
        self._compared: deque[Measured] = deque(maxlen=COMPARED_UPDATES)
        self._updates = 0
        self._closed = False
        # A script that ends without destroying its engine has trained all the same.
        atexit.register(self.close)
        _ALIVE.add(self)

    def updated(self, phases: Sequence[PhaseSpan], timeline: Callable[[], Timeline]) -> None:
        """After each update, what the model did around it; ``timeline`` is asked for only when it is used."""
        self._updates += 1
        record = UpdateRecord(self._updates, self._progress(), phases, self._work, timeline)
        if self._predict is not None and self._updates > WARM_UPDATES:
            self._compared.append(record.measured)
        self._tell(lambda outlet: outlet.updated(record, self))

    @property
    def compared_updates(self) -> int:
        return len(self._compared)

    def compared(self) -> list[Compared]:
        """Predicted against measured, of the updates so far; empty if nothing was predicted or measured."""
        if self._predict is None or not self._compared:
            return []
        return compare(self._predict, self._compared)

    def predicted(self) -> Predicted | None:
        """As it is compared."""
        if self._predict is None or not self._compared:
            return None
        return self._predict(median_windows(self._compared))

    def close(self) -> None:
        """Log, once, what was planned and how good the prediction was: training is over."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._planned and self._updates:
            self._log(self._planned)
        if rows := self.compared():
            lines = "\n".join(f"  {row}" for row in rows)
            self._log(
                f"predicted against measured, median of {len(self._compared)} of {self._updates} updates:\n{lines}"
            )
        self._tell(lambda outlet: outlet.close(self))

    def _tell(self, tell: Callable[[Outlet], None]) -> None:
        for outlet in list(self._outlets):
            try:
                tell(outlet)
            except Exception as error:  # noqa: BLE001
                self._outlets.remove(outlet)
                self._log(
                    f"{outlet.name}: the update cannot be reported there: {type(error).__name__}: {error}. "
                    f"There will be no more reports there; training goes on."
                )


_ALIVE: weakref.WeakSet[UpdateReport] = weakref.WeakSet()


def _close_in_forked_child() -> None:
    """Keep a forked child that runs its exit callbacks from writing its parent's report."""
    for report in _ALIVE:
        report._closed = True


os.register_at_fork(after_in_child=_close_in_forked_child)
