"""List the arms that run on every emulated machine: stock, and the plugin with simple placements and with its plan."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.emulated.run import EmulatedRun
from benchmarks.harness.variants import NO_OVERLAP, STOCK, Variant, ours

PLANNED = "planned, overlap"
"""The name of the arm that plans by itself."""

NEVER_CLIPS = 1e6
"""The limit of the norm: the small model's gradients would be clipped in each step, unlike a trained model's."""

SHARED = {
    # Emulated seconds do not depend on the cores of this machine, which other processes may use.
    "bind_cores": False,
    "cpu_threads": 1,
}


def arms_of(run: EmulatedRun) -> list[Variant]:
    """Return the arms of ``run``, stock first. Stock and the planned arm also train without updates."""
    # The software GPU has far more free memory than this margin and these slots, so that memory never counts as short.
    memory = {"gpu_memory_gb": run.free_gb, "gpu_memory_margin_gb": 0.1 * run.scale}
    arms = [
        replace(STOCK, measures_cost=True),
        ours("all CPU, no overlap", placement="cpu", **SHARED, **NO_OVERLAP),
        ours("all streamed, overlap", placement="streamed", num_slots=2, **SHARED),
        replace(ours(PLANNED, **SHARED, **memory), measures_cost=True),
    ]
    return [replace(arm, zero=run.zero, clipping=NEVER_CLIPS, states=run.states) for arm in arms]
