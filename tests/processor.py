"""Cache the processor information of py-cpuinfo for all processes of the tests.

DeepSpeed queries py-cpuinfo three times in each process that uses its CPU Adam. Each query starts a Python process that
takes more than a second, which would double the duration of the tests.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import cpuinfo

CACHE_FILE = Path(__file__).resolve().parent.parent / ".cache" / "processor.json"


def cache_processor_info() -> None:
    """Replace py-cpuinfo's query by one that reads and writes a file of the cache.

    The package ``tests`` calls this when it is imported, so it applies to every program that is one of its modules.
    """
    query = cpuinfo.get_cpu_info

    @cache
    def get_cpu_info() -> dict[str, Any]:
        try:
            info: dict[str, Any] = json.loads(CACHE_FILE.read_text())
        except (OSError, ValueError):
            info = query()
            CACHE_FILE.parent.mkdir(exist_ok=True)
            partial = CACHE_FILE.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(info))
            # The replacement is atomic: a concurrent reader finds a complete file or none.
            partial.replace(CACHE_FILE)
        return info

    cpuinfo.get_cpu_info = get_cpu_info


def clear_processor_info() -> None:
    """Remove the cached file, because the next run of the tests may have another processor."""
    CACHE_FILE.unlink(missing_ok=True)
