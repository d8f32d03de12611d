"""Train the EMULATED run of ``make demo`` with stock and with the plugin, and write the measurements.

The folder that ``--output`` names gets the measured seconds as ``emulated.json``, the timeline of an update as
``timeline.png``, and a folder that ``deep-opt-states report`` reads, from which the seconds of the plugin are.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from unittest import mock

import torch

from benchmarks.emulated.arms import NEVER_CLIPS, SHARED
from benchmarks.emulated.run import EmulatedRun, SmallModel, start_device
from benchmarks.emulated.turns import Arm
from benchmarks.harness.interleaved_runs import ADAPTING, engine_for, weights_digest
from benchmarks.harness.variants import STOCK, Variant, ours
from deep_opt_states.report.folder import RecordedRun, values_of
from examples.common.one_rank import be_the_only_rank_unless_launched, do_not_build_shared_memory_collectives
from perf_model.prediction.draw import draw
from perf_model.prediction.hardware import HardwareProfile
from perf_model.prediction.timeline import Phase, PhaseSpan
from perf_model.presets.machines import MACHINES
from perf_model.training_run.training_memory import TrainingMemory
from tests.software_gpu import settings

MEASURED = 4

CORES = 32
"""The cores of the machine, 16 per GPU as in the cloud. With all of the preset, host memory limits Adam on the CPU."""

LEAST_UNIT = 99e6
"""The least parameters of the run in a unit."""

MARGIN_SHARE = 0.05
"""The share of the GPU's memory that stays free."""


@dataclass(frozen=True, kw_only=True)
class DemonstratedRun(EmulatedRun):
    """A run whose emulated seconds equal the machine's: page, picture and table show the same seconds."""

    @property
    def slowdown(self) -> float:
        """Return 1."""
        return 1.0

    @property
    def scaled_unit_sizes(self) -> tuple[int, ...]:
        """Return the larger sizes of units, with which the Python code of this machine keeps up."""
        return tuple(size for size in super().scaled_unit_sizes if size * self.scale >= LEAST_UNIT)

    @cached_property
    def profile(self) -> HardwareProfile:
        """Return the profile of the machine with ``CORES``."""
        return replace(MACHINES[self.machine], cores=CORES).profile(self.ranks)

    @property
    def free_gb(self) -> float:
        """Return the gigabytes of each GPU that training leaves for the states."""
        assert self.profile.gpu_memory_bytes is not None
        return ((1 - MARGIN_SHARE) * self.profile.gpu_memory_bytes - TrainingMemory(self.job).gpu_bytes) / 1e9


RUN = DemonstratedRun(machine="h100-pcie5", ranks=2, model="20B", small=SmallModel(layers=4, sub_group_size=10**9))


def main() -> None:
    """Train both arms one after the other, and write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the folder for the files")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    be_the_only_rank_unless_launched()
    do_not_build_shared_memory_collectives()
    start_device()
    memory = {"gpu_memory_gb": RUN.free_gb, "gpu_memory_margin_gb": 0.1}
    report = folder / f"{RUN.model}-on-{RUN.ranks}-{RUN.machine}"
    variants = STOCK, ours("plugin", report=str(report), **memory, **SHARED)
    stock, plugin = [_train(replace(variant, zero=RUN.zero, clipping=NEVER_CLIPS)) for variant in variants]
    run = RecordedRun.read(report)
    results = {
        "model": f"{RUN.model} ({RUN.job.shape.numel / 1e9:.1f} B parameters)",
        "machine": f"{RUN.ranks} x {RUN.machine} with {CORES} cores",
        "small_model": RUN.small.parameters,
        "free_gb": RUN.free_gb,
        "plan": str(plugin.plan),
        "folder": str(report),
        "arms": {
            # Stock's step is its update, all of which is exposed.
            "stock": {"iteration_s": stock.iteration_s, "exposed_s": stock.step_s},
            # The medians of these values are on the page.
            "plugin": {key: values_of(key, run.typical_steps) for key in ("iteration_s", "exposed_s")},
        },
        "lag_s": plugin.lag_s[-len(run.typical_steps) :],
        "bit_identical": (stock.losses, stock.digest) == (plugin.losses, plugin.digest),
    }
    (folder / "emulated.json").write_text(json.dumps(results, indent=2))
    title = f"EMULATED, {results['model']} on {results['machine']}: {plugin.plan}"
    assert run.measured is not None
    timeline, phases = run.measured
    draw(timeline, folder / "timeline.png", title, phases, _phases_of(stock))


def _phases_of(stock: Arm) -> list[PhaseSpan]:
    """Return the phases of a median iteration of stock: its update, all of which is exposed, and forward."""
    update_s, forward_s = median(stock.step_s), median(stock.forward_s)
    return [PhaseSpan(Phase.EXPOSED, 0.0, update_s), PhaseSpan(Phase.FORWARD, update_s, update_s + forward_s)]


def _train(variant: Variant) -> Arm:
    """Train one arm. Stock adapts to nothing, so its first iterations need take no emulated time."""
    with RUN.planned_by_plugin() as passes, mock.patch.object(torch.nn.Parameter, "__repr__", object.__repr__):
        adapts = variant.block is not None
        with engine_for(variant, RUN.small) as engine:
            arm = Arm.create(variant, engine, passes)
            if adapts:
                passes.take_time = True
                arm.train(RUN.small, ADAPTING)
                arm.plan = engine.optimizer.plan
            else:
                with settings.changed(rates=settings.MachineRates()):
                    arm.train(RUN.small, ADAPTING)
                passes.take_time = True
            arm.take_turn(RUN.small, MEASURED)
            passes.take_time = False
            arm.digest = weights_digest(engine)
            arm.engine = None
    return arm


if __name__ == "__main__":
    main()
