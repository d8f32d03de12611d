"""Does the plugin keep its promises? ``pytest -m P1 --collect-only`` lists the tests of one.

DeepSpeed queries py-cpuinfo three times in each process that uses its CPU Adam, and each query starts a Python process
that takes more than a second. In every program that is a module of this package, a file of the cache answers instead.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import cpuinfo

PROCESSOR_FILE = Path(__file__).resolve().parent.parent / ".cache" / "processor.json"
"""The cached answer, which ``conftest.py`` removes first: the next run of the tests may have another processor."""

_query = cpuinfo.get_cpu_info


@cache
def _cached_processor_info() -> dict[str, Any]:
    try:
        info: dict[str, Any] = json.loads(PROCESSOR_FILE.read_text())
    except (OSError, ValueError):
        info = _query()
        PROCESSOR_FILE.parent.mkdir(exist_ok=True)
        partial = PROCESSOR_FILE.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(info))
        # The replacement is atomic: a concurrent reader finds a complete file or none.
        partial.replace(PROCESSOR_FILE)
    return info


cpuinfo.get_cpu_info = _cached_processor_info
