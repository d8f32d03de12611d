"""Print and keep numbers that a test measures without a bound; they are stored with the outcome of the part."""

from __future__ import annotations

import json
from datetime import datetime, timezone

from tests.launch import REPOSITORY

FIGURES = REPOSITORY / ".cache" / "gpu-figures.jsonl"


def figure(name: str, value: float, unit: str) -> None:
    """Print the number and append it to ``FIGURES``."""
    print(f"{name}: {value:.4g} {unit}", flush=True)
    FIGURES.parent.mkdir(exist_ok=True)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with FIGURES.open("a") as file:
        file.write(json.dumps({"figure": name, "value": value, "unit": unit, "when": now}) + "\n")
