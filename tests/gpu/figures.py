"""Print and keep numbers that a test measures without a bound; they are stored with the outcome of the part."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path

from tests.launch import REPOSITORY

FIGURES_FILE = "GPU_CHECK_FIGURES"
"""The environment variable with the file of the part that runs: parts that run at the same time have files of their
own."""


def figures_of(part: str) -> Path:
    """Return the file for the numbers of a part."""
    return REPOSITORY / ".cache" / f"gpu-figures-{part}.jsonl"


def figure(name: str, value: float, unit: str) -> None:
    """Print the number and append it to the file of the part that runs."""
    print(f"{name}: {value:.4g} {unit}", flush=True)
    path = Path(os.environ.get(FIGURES_FILE) or figures_of("alone"))
    path.parent.mkdir(exist_ok=True)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with path.open("a") as file:
        file.write(json.dumps({"figure": name, "value": value, "unit": unit, "when": now}) + "\n")
