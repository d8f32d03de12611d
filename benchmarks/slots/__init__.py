"""Would more staging slots hide more of the update, and when is memory free for them?

No row is a measurement of a GPU. SIMULATED rows come from ``perf_model`` alone, and EMULATED ones from the software GPU
of the tests, on which a small model trains (``benchmarks/emulated``).

- ``phase_curve``: how is an update simulated whose slots exist only in some phases?
- ``simulated_slots``: what would they gain in the planner's settings?
- ``emulated_slots``: what do more slots gain on EMULATED machines, and when is training's memory free there?
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness.charts import Bars
from benchmarks.harness.rows import Row
from benchmarks.slots.emulated_slots import EXPOSED, emulated_rows
from benchmarks.slots.simulated_slots import simulated_rows

CHART = Bars(EXPOSED)


def measure(*, quick: bool) -> Iterator[Row]:
    """Yield the simulated rows, and then the emulated ones."""
    yield from simulated_rows(quick=quick)
    yield from emulated_rows(quick=quick)
