"""Train the EMULATED run of ``make demo`` with stock and with the plugin, and write the measurements.

The folder that ``--output`` names gets the measured seconds as ``emulated.json``, the timeline of an update as
``timeline.png``, and the folder ``emulated`` that ``deep-opt-states report`` reads.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch

from benchmarks.emulated.arms import NEVER_CLIPS, SHARED
from benchmarks.emulated.run import EmulatedRun, SmallModel, start_device
from benchmarks.emulated.turns import Arm
from benchmarks.harness.interleaved_runs import ADAPTING, engine_for, weights_digest
from benchmarks.harness.variants import STOCK, Variant, ours
from examples.common.one_rank import be_the_only_rank_unless_launched, do_not_build_shared_memory_collectives
from perf_model.prediction.draw import draw
from perf_model.training_run.training_memory import TrainingMemory
from tests.software_gpu import settings

MEASURED = 4

MARGIN_SHARE = 0.05
"""The share of the GPU's memory that stays free."""


@dataclass(frozen=True, kw_only=True)
class DemonstratedRun(EmulatedRun):
    """A run whose emulated seconds are those of the machine: page, picture and table show the same seconds."""

    @property
    def slowdown(self) -> float:
        """Return 1."""
        return 1.0

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
    variants = STOCK, ours("plugin", report=str(folder / "emulated"), **memory, **SHARED)
    stock, plugin = arms = [_train(replace(variant, zero=RUN.zero, clipping=NEVER_CLIPS)) for variant in variants]
    results = {
        "model": f"{RUN.model} ({RUN.job.shape.numel / 1e9:.1f} B parameters)",
        "machine": f"{RUN.ranks} x {RUN.machine}",
        "small_model": RUN.small.parameters,
        "free_gb": RUN.free_gb,
        "plan": str(plugin.plan),
        "arms": {arm.variant.name: _seconds(arm) for arm in arms},
        "bit_identical": (stock.losses, stock.digest) == (plugin.losses, plugin.digest),
    }
    (folder / "emulated.json").write_text(json.dumps(results, indent=2))
    title = f"EMULATED, {results['model']} on {results['machine']}: {plugin.plan}"
    draw(plugin.timelines[-1], folder / "timeline.png", title, plugin.phases[-1])


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


def _seconds(arm: Arm) -> dict[str, list[float]]:
    """Return the seconds of each measured iteration, and of each update that the model waited for."""
    # Stock's step is its update, all of which is exposed.
    exposed_s = [update.exposed_s for update in arm.updates[-MEASURED:]] or arm.step_s
    return {"iteration_s": arm.iteration_s, "exposed_s": exposed_s}


if __name__ == "__main__":
    main()
