"""One voice, DeepSpeed's."""

from __future__ import annotations

import logging

from deepspeed.utils import log_dist


def say(message: str) -> None:
    """Rank 0 logs. At the level that DeepSpeed's logger shows by default: a changed update must not go unseen."""
    log_dist(f"[deep_opt_states] {message}", ranks=[0], level=logging.WARNING)
