"""Run the cases of one world size one after another in one process, and end at the first that raises an exception.

The collectives of the ranks no longer match after that, so that a later case could wait forever. The exception is part
of the result, and the test reports it.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

Result = dict[str, Any]


def results_in_turn(work: Iterable[tuple[str, Callable[[], Result]]]) -> Iterator[tuple[str, Result]]:
    """Yield the name and the result of each piece of ``work``; after an exception, its traceback as the last result."""
    # DeepSpeed's CPU accelerator returns False on some CPUs, but trains fp16 on all of them.
    get_accelerator().is_fp16_supported = lambda: True
    for name, find in work:
        try:
            result = find()
        except Exception:  # noqa: BLE001 (reported by the test)
            yield name, {"error": traceback.format_exc()}
            return
        yield name, result


def write_results(work: Mapping[str, Callable[[], Result]], path: str) -> None:
    """Write the results by name to ``path``, to which the rank is appended."""
    Path(f"{path}.{dist.get_rank()}").write_text(json.dumps(dict(results_in_turn(work.items()))))
