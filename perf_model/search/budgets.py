"""Define ``Budgets``, the memory that a plan may take, and the error that is raised if no plan fits."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from perf_model.prediction.memory import MemoryUse
from perf_model.units import DIGITS, GB, size

GPU_MARGIN_BYTES = 2 * GB
"""The GPU memory that training leaves free by default when it fills the GPU with states."""


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Bytes that the optimizer of one rank may take; None is unlimited. ``host_bytes`` includes the pinned bytes."""

    gpu_bytes: int | None = None
    host_bytes: int | None = None
    pinned_bytes: int | None = None

    def with_gpu_margin(self, margin_bytes: int, required_bytes: int) -> Budgets:
        """Return the budgets of a planner that leaves ``margin_bytes`` of the GPU memory free, as training does.

        ``required_bytes`` is the GPU memory of the units that rules by name place there. They may use the margin.
        """
        if self.gpu_bytes is None:
            return self
        return replace(self, gpu_bytes=min(self.gpu_bytes, max(0, required_bytes, self.gpu_bytes - margin_bytes)))

    def missing(self, memory: MemoryUse) -> dict[str, int]:
        """Return, for each budget that ``memory`` exceeds, the excess in bytes; empty if ``memory`` fits."""
        missing = {}
        for budget in fields(self):
            allowed = getattr(self, budget.name)
            excess = 0 if allowed is None else getattr(memory, budget.name) - allowed
            if excess > 0:
                missing[budget.name] = excess
        return missing


class DoesNotFit(ValueError):
    """No plan fits the budgets. ``missing`` are the bytes, by budget, by which the nearest plan exceeds them."""

    def __init__(self, missing: dict[str, int], remedy: str = "Use more ranks.") -> None:
        self.missing = missing
        self.rule = f"Nothing fits: the nearest plan exceeds {excess_of(missing)}."
        super().__init__(f"{self.rule}\n{remedy}")


def excess_of(missing: dict[str, int]) -> str:
    """Return by how much the memory of each rank exceeds the budgets ``missing``."""
    return " and ".join(
        f"{name.removesuffix('_bytes')} memory by {size(excess, DIGITS)} per rank" for name, excess in missing.items()
    )
