"""Define the error after which optimizer states are not used or saved."""

from __future__ import annotations

import threading
from collections.abc import Sequence

_REMEDY = (
    "Parameters and optimizer states will not be used or saved. Fix the cause, and continue from the last checkpoint."
)


class UpdateFailed(RuntimeError):
    """The error for an update that was not applied as a whole on some rank."""

    @classmethod
    def on_ranks(cls, failures: Sequence[str]) -> UpdateFailed:
        """Return the failure that the other ranks keep after ``failures``, one text per rank, empty without one."""
        found = (f"rank {rank} cannot continue: {failure}" for rank, failure in enumerate(failures) if failure)
        return cls("; ".join(found))

    @classmethod
    def because_of(cls, failure: BaseException | None) -> UpdateFailed:
        """Return the error that every use of the states raises after ``failure``, which is its cause."""
        if isinstance(failure, UpdateFailed):
            text = f"The optimizer states are not usable on all ranks ({failure}). {_REMEDY}"
        else:
            text = (
                f"The optimizer update was not applied as a whole ({type(failure).__name__}: {failure}). Parameters "
                f"and optimizer states are inconsistent if some are updated and others are not. {_REMEDY}"
            )
        error = cls(text)
        error.__cause__ = failure
        return error


class Stop:
    """The stop of an update after a failure: nothing further is issued, and no thread starts anything."""

    def __init__(self) -> None:
        self._is_set = threading.Event()
        self.cause: BaseException | None = None
        """The failure of a thread that has stopped the update; a write of the last update may also do so."""

    def is_set(self) -> bool:
        return self._is_set.is_set()

    def set(self, cause: BaseException | None = None) -> None:
        """Stop the update, because of the failure ``cause`` of a thread. The first one counts."""
        self.cause = self.cause or cause
        self._is_set.set()

    def raise_cause(self) -> None:
        if self.cause is not None:
            raise self.cause

    def clear(self) -> None:
        self.cause = None
        self._is_set.clear()
