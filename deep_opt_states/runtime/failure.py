"""Define the error after which optimizer states are not used or saved."""

from __future__ import annotations

_REMEDY = (
    "Parameters and optimizer states will not be used or saved. Fix the cause, and continue from the last checkpoint."
)


class UpdateFailed(RuntimeError):
    """The error for an update that was not applied as a whole on some rank."""

    @classmethod
    def on_ranks(cls, ranks: list[int]) -> UpdateFailed:
        """Return the failure that is kept on the other ranks after a failure on ``ranks``."""
        if len(ranks) == 1:
            return cls(f"rank {ranks[0]} cannot continue; the message of that rank has the cause")
        return cls(f"ranks {', '.join(map(str, ranks))} cannot continue; the messages of these ranks have the cause")

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
