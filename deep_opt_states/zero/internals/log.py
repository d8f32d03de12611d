"""One voice, DeepSpeed's."""

from __future__ import annotations

import logging

from deepspeed.utils import log_dist, logger


def say(message: str) -> None:
    """Rank 0 logs. At the level that DeepSpeed's logger shows by default: a changed update must not go unseen."""
    log_dist(f"[deep_opt_states] {message}", ranks=[0], level=logging.WARNING)


def say_error(error: BaseException) -> None:
    """The rank that has it logs it, with its traceback."""
    logger.error(f"[deep_opt_states] {error}", exc_info=error)
