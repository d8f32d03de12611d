"""The plugin's log, a logger of its own: information and warnings on rank 0, a rank's own on that rank.

A handler that the script has given to this logger before the first line replaces ours, and its level is kept. Our
lines do not reach the handlers of the root logger, which would show them twice.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cache


class PrefixedHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """A handler that prints each record after our name and, unless that is INFO, its level, as DeepSpeed on stdout."""

    def emit(self, record: logging.LogRecord) -> None:
        # Not the stdout of the first line: it may be closed.
        self.stream = sys.stdout
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname}: "
        return f"[deep_opt_states] {level}{super().format(record)}"


@cache
def _logger() -> logging.Logger:
    # A framework's own class of loggers may drop the INFO of all other packages, as axolotl's does.
    frameworks_class = logging.getLoggerClass()
    logging.setLoggerClass(logging.Logger)
    try:
        logger = logging.getLogger("deep_opt_states")
    finally:
        logging.setLoggerClass(frameworks_class)
    if not logger.handlers:
        logger.addHandler(PrefixedHandler())
        logger.propagate = False
        logger.setLevel(logger.level or logging.INFO)
    return logger


_rank: int | None = None
"""The rank when a process group was last seen: at exit there may be none any more."""


def _this_rank() -> int:
    global _rank
    # No import: a program without torch.distributed, or with a part of it, has one rank.
    is_initialized = getattr(sys.modules.get("torch.distributed"), "is_initialized", lambda: False)
    if is_initialized():
        _rank = sys.modules["torch.distributed"].get_rank()
    # Of PyTorch's and DeepSpeed's launchers, of srun and of mpirun.
    by_launcher = next(filter(None, map(os.environ.get, ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"))), "")
    return _rank if _rank is not None else int(by_launcher) if by_launcher.isdigit() else 0


def info(message: str) -> None:
    if _this_rank() == 0:
        _logger().info(message)


def warn(message: str) -> None:
    if _this_rank() == 0:
        _logger().warning(message)


info_once, warn_once = cache(info), cache(warn)


def warn_this_rank(message: str) -> None:
    _logger().warning(_prefix() + message)


def info_this_rank(message: str) -> None:
    _logger().info(_prefix() + message)


def error(failure: BaseException) -> None:
    """Log ``failure`` with its traceback on this rank."""
    _logger().error(f"{_prefix()}{failure}", exc_info=failure)


def _prefix() -> str:
    return f"rank {rank}: " if (rank := _this_rank()) > 0 else ""
