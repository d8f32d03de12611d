"""How long does an update with states on disk take, compared with stock's swapper on the same disk? (EMULATED)

Nothing is a measurement of a GPU or of a disk. Both arms have the same disk, which is emulated as is the rest of the
machine (``benchmarks/emulated``). All states are on the disk, so the CPU updates all units. The seconds are the
emulated machine's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.emulated.arms import NEVER_CLIPS, SHARED
from benchmarks.emulated.run import LAG, EmulatedRun, SmallModel
from benchmarks.emulated.throttled_disk import ThrottledDisk, swapper_on
from benchmarks.emulated.turns import Arm, Turns, train_in_turns
from benchmarks.harness.rows import BIT_IDENTICAL, EMULATED, Row
from benchmarks.harness.variants import STOCK, Variant, ours
from perf_model.prediction.cost import DiskRates
from perf_model.schedule.cutting import DISK_UNIT_SIZE

DISKS = {
    "both at once": DiskRates(read=6.5e9, write=5e9, both=11.5e9),
    "one after the other": DiskRates.one_after_the_other(6.5e9, 5e9),
}
"""PCIe 4 SSDs that lose nothing by concurrent reads and writes, and that gain nothing."""

RUN = EmulatedRun(machine="rtx4090", ranks=1, small=SmallModel(layers=8, width=512, sub_group_size=2_000_000))

PIPELINED = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 16}
"""Stock then reads the next sub-group and writes the last one meanwhile. Off by default."""

ON_DISK = "plugin, states on disk"
ITERATION, UPDATE = f"{EMULATED} iteration", f"{EMULATED} update"
PER_STOCK, PER_BYTES = "stock's", "seconds of its bytes"


def measure(*, quick: bool) -> Iterator[Row]:
    """Yield the seconds of an iteration and of an update of each arm, and of the bytes that it moves."""
    run = replace(RUN, small=SmallModel(layers=2, sub_group_size=500_000)) if quick else RUN
    turns = Turns(turns=1, iterations=1) if quick else Turns(turns=3, iterations=2)
    for name in list(DISKS)[:1] if quick else DISKS:
        yield from _measure_disk(run, turns, name)


def _measure_disk(run: EmulatedRun, turns: Turns, name: str) -> Iterator[Row]:
    with TemporaryDirectory() as folder, run.planned_by_plugin() as passes, ExitStack() as disks:
        per_s = 1 / (run.scale * run.slowdown)
        rates = DiskRates(*(per_s * rate for rate in DISKS[name]))
        in_memory, *on_disk = _variants(run, folder)
        throttled = [ThrottledDisk(rates, lambda: passes.take_time) for _ in on_disk]
        folders = [str(variant.offload["nvme_path"]) for variant in on_disk]
        of_plugin = throttled[-1]
        disks.enter_context(swapper_on(dict(zip(folders, throttled, strict=True))))
        disks.enter_context(of_plugin.for_plugin())
        reference, *arms = train_in_turns(run, [in_memory, *on_disk], passes, turns)
    labels = {**run.labels, "disk": f"{EMULATED} 6.5 / 5 GB/s, {name}"}

    def row(arm: Arm, quantity: str, samples: Sequence[float], unit: str = "s") -> Row:
        samples = [sample / run.slowdown for sample in samples] if unit == "s" else samples
        return Row(variant=arm.variant.name, quantity=quantity, unit=unit, samples=samples, setting=labels)

    stock, *_, plugin = arms
    for arm, disk in zip(arms, throttled, strict=True):
        yield row(arm, ITERATION, arm.iteration_s)
        yield row(arm, UPDATE, _updates_s(arm))
        yield row(arm, "EMULATED seconds of the bytes of an update", [disk.bound_s])
        for direction, size in disk.update_bytes.items():
            yield row(arm, f"bytes per parameter, {direction}", [size / run.small.parameters], "B")
        yield row(arm, LAG, arm.lag_s)
        same = (arm.losses, arm.digest) == (reference.losses, reference.digest)
        yield replace(row(arm, f"{BIT_IDENTICAL} ({EMULATED})", ()), value=same, claimed=True)
    for quantity, samples, of_stock_s in (
        (ITERATION, plugin.iteration_s, stock.iteration_s),
        (UPDATE, _updates_s(plugin), stock.step_s),
    ):
        ratios = [ours_s / stock_s for ours_s, stock_s in zip(samples, of_stock_s, strict=False)]
        yield row(plugin, f"{quantity} / {PER_STOCK}", ratios, "times")
        yield row(plugin, f"{quantity} / {PER_BYTES}", [sample_s / of_plugin.bound_s for sample_s in samples], "times")


def _updates_s(arm: Arm) -> list[float]:
    """Return the seconds from ``step()`` to the last write. Stock's step is its update."""
    return [update.update_s for update in arm.updates] or arm.step_s


def _variants(run: EmulatedRun, folder: str) -> list[Variant]:
    def on_disk(name: str, **keys: Any) -> dict[str, Any]:
        (path := Path(folder) / name).mkdir()
        # Stock needs five buffers: three states, the gradient, and one for gradients that are written.
        return {"device": "nvme", "nvme_path": str(path), "buffer_count": 5, **keys}

    block = {"placement": "cpu", "host_memory_gb": 0, "unit_size": round(DISK_UNIT_SIZE / run.scale), **SHARED}
    arms = [
        replace(STOCK, name="stock, states in host memory"),
        replace(STOCK, name="stock, states on disk", offload=on_disk("stock"), exact=False),
        replace(STOCK, name="stock, pipelined", offload=on_disk("pipelined", **PIPELINED), exact=False),
        replace(ours(ON_DISK, **block), offload=on_disk("plugin")),
    ]
    return [replace(arm, zero=run.zero, clipping=NEVER_CLIPS) for arm in arms]
