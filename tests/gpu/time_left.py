"""How long a test may still wait for a process, so that it can say what happened before its part is stopped."""

from __future__ import annotations

import os
import time

PART_ENDS = "GPU_CHECK_PART_ENDS"
"""The environment variable in which ``check.py`` tells a part when it will be stopped, as ``time.time()``."""

REPORT_S = 4.0
"""For pytest to write a failure, and for the process group to end."""

ALONE_S = 120.0
"""For a test that is run by hand."""


def seconds_left() -> float:
    ends = os.environ.get(PART_ENDS)
    return ALONE_S if ends is None else max(1.0, float(ends) - time.time() - REPORT_S)
