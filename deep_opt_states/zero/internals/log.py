"""Log with the prefix of the plugin, at a level that DeepSpeed's logger shows by default."""

from __future__ import annotations

import logging
from functools import cache

from deepspeed.utils import log_dist, logger


def log_rank_0(message: str) -> None:
    """Log ``message`` on rank 0."""
    log_dist(f"[deep_opt_states] {message}", ranks=[0], level=logging.WARNING)


log_rank_0_once = cache(log_rank_0)


def log_this_rank(message: str) -> None:
    """Log ``message`` with this rank, even if the process group no longer exists."""
    log_dist(f"[deep_opt_states] {message}", ranks=[-1], level=logging.WARNING)


def log_error(error: BaseException) -> None:
    """Log ``error`` with its traceback on this rank."""
    logger.error(f"[deep_opt_states] {error}", exc_info=error)
