"""``Budgets``: the memory that a plan may take, and what to say when nothing fits."""

from __future__ import annotations

from dataclasses import dataclass, fields

from perf_model.prediction.memory import Memory
from perf_model.units import gigabytes


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Bytes that one rank's optimizer may take; None is no limit. ``host_bytes`` includes the pinned ones."""

    gpu_bytes: int | None = None
    host_bytes: int | None = None
    pinned_bytes: int | None = None

    def missing(self, memory: Memory) -> dict[str, int]:
        """By budget, the bytes by which ``memory`` exceeds it; empty if it fits."""
        missing = {}
        for budget in fields(self):
            allowed = getattr(self, budget.name)
            excess = 0 if allowed is None else getattr(memory, budget.name) - allowed
            if excess > 0:
                missing[budget.name] = excess
        return missing


class DoesNotFit(ValueError):
    """No plan fits the budgets. ``missing`` are the bytes, by budget, that the nearest one lacks."""

    def __init__(self, missing: dict[str, int], remedy: str = "Use more ranks, or smaller sub-groups.") -> None:
        self.missing = missing
        lacks = " and ".join(
            f"{name.removesuffix('_bytes')} memory by {gigabytes(lack)} a rank" for name, lack in missing.items()
        )
        self.rule = f"Nothing fits: the nearest plan exceeds {lacks}."
        super().__init__(f"{self.rule}\n{remedy}")
