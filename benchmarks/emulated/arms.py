"""List the arms that run on every emulated machine: stock, and each placement with and without overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.emulated.scaled_run import ScaledRun
from benchmarks.harness.variants import NO_OVERLAP, STOCK, Variant, ours

WITHOUT = "no overlap"

# The software GPU has far more free memory for slots than the GPU that it emulates.
_SLOTS = {"num_slots": 2}

COSTED = (STOCK.name, "planned, overlap")
"""The names of the arms that also train without updates, as the base for the cost of the update."""

NEVER_CLIPS = 1e6
"""The limit of the norm: the small model's gradients would be clipped in each step, unlike those of a trained model."""

PLACEMENTS: dict[str, dict[str, Any]] = {
    "all CPU": {"placement": "cpu"},
    "all streamed": {"placement": "streamed", **_SLOTS},
    "stride 2": {"placement": "stride", "update_stride": 2, **_SLOTS},
    "stride 3": {"placement": "stride", "update_stride": 3, **_SLOTS},
}

SHARED = {
    # Emulated seconds do not depend on the cores of this machine, which other processes may use.
    "bind_cores": False,
    "cpu_threads": 1,
}


def arms_of(run: ScaledRun) -> list[Variant]:
    """Return the arms of ``run``, stock first."""
    # The software GPU has far more free memory than this margin, so that memory never counts as short.
    memory = {"gpu_memory_gb": run.free_gb, "gpu_memory_margin_gb": 0.1 * run.scale}
    placements = PLACEMENTS | {"planned": {"placement": "planned", **memory}}
    arms = [STOCK]
    for name, placement in placements.items():
        arms += [
            ours(f"{name}, {WITHOUT}", **SHARED, **placement, **NO_OVERLAP),
            ours(f"{name}, overlap", **SHARED, **placement),
        ]
    costed = [replace(arm, measures_cost=arm.name in COSTED) for arm in arms]
    return [replace(arm, zero=run.zero, clipping=NEVER_CLIPS, states=run.states) for arm in costed]


FEW_ARMS: Sequence[str] = (
    STOCK.name,
    f"all CPU, {WITHOUT}",
    "all streamed, overlap",
    "planned, overlap",
)
"""The names of the arms that a quick run compares, and a run whose iterations take long."""
