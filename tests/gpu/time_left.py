"""Compute how long a test may still wait for a process, so that it can report before its part is stopped."""

from __future__ import annotations

import os
import time

PART_ENDS = "GPU_CHECK_PART_ENDS"
"""The environment variable with the time at which ``run_parts.py`` will stop a part, as ``time.time()``."""

REPORT_S = 4.0
"""The time that pytest needs to write a failure, and the process group to end."""

ALONE_S = 120.0
"""The limit for a test that is run without ``run_parts.py``."""


def seconds_left() -> float:
    """Return the seconds that the test may still wait, at least 1."""
    ends = os.environ.get(PART_ENDS)
    return ALONE_S if ends is None else max(1.0, float(ends) - time.time() - REPORT_S)
