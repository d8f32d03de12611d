"""What py-cpuinfo says of the processor, asked once for all processes of the tests.

DeepSpeed asks three times in each process that uses its CPU Adam, and each time py-cpuinfo starts a Python that takes
more than a second: half of what the tests would take.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import cpuinfo

KEPT = Path(__file__).resolve().parent.parent / ".cache" / "processor.json"


def asked_once() -> None:
    """Imported with the package, so in every program of the tests that is one of its modules."""
    ask = cpuinfo.get_cpu_info

    @cache
    def get_cpu_info() -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(KEPT.read_text())
        except (OSError, ValueError):
            answer = ask()
            KEPT.parent.mkdir(exist_ok=True)
            partial = KEPT.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(answer))
            # Whoever reads meanwhile finds all of it or nothing.
            partial.replace(KEPT)
        return answer

    cpuinfo.get_cpu_info = get_cpu_info


def forget() -> None:
    """The next run of the tests may have another processor."""
    KEPT.unlink(missing_ok=True)
