"""Define the error of an update that was applied only in part."""

from __future__ import annotations


class UpdateFailed(RuntimeError):
    """The error for an update that was applied only in part: some units are updated, others are not."""

    @classmethod
    def because_of(cls, failure: BaseException | None) -> UpdateFailed:
        """Return the error that every use of the states raises after ``failure``, which is its cause."""
        error = cls(
            f"The optimizer update was applied only in part ({type(failure).__name__}: {failure}). "
            f"Parameters and optimizer states are inconsistent, since some are updated and others are not: they will "
            f"not be used or saved. Fix the cause below, and continue from the last checkpoint."
        )
        error.__cause__ = failure
        return error
