"""Rank 1's update fails, on the lane given; every rank stops, none hangs, and all recover from the checkpoint."""

from __future__ import annotations

import sys
import traceback
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deep_opt_states.device.kernels.fused import FusedAdam
from deep_opt_states.runtime.executor import UpdateFailed
from perf_model.placement import Placement
from tests.zero.parity.arm import Record, collect, differences, make_engine, shared_folder, train
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.parity.model import batch
from tests.zero.process_group import process_group

CASE = Case(
    name="failing",
    blocks=(STRIDE_2,),
    world_size=2,
    steps=2,
    clip=0.5,
    schedule=False,
    zero={"stage3_gather_16bit_weights_on_model_save": True},
)


class Broken(Exception):
    pass


def step(engine: Any) -> None:
    x, target = batch(CASE, dist.get_rank(), 7, torch.bfloat16)
    engine.backward(engine(x, target, None, 1.0))
    engine.step()


def failed_step(engine: Any, lane: str) -> str:
    """The traceback of a step in which rank 1 fails at its second update on ``lane``."""
    placement = {"cpu": Placement.CPU, "compute": Placement.STREAMED}[lane]
    placements = engine.optimizer.plan.placements
    victim = [index for index, its in enumerate(placements) if its is placement][1]
    update = FusedAdam.update

    def broken(self: FusedAdam, sub_group: int, *args: Any) -> None:
        if dist.get_rank() == 1 and sub_group == victim:
            raise Broken("out of luck")
        update(self, sub_group, *args)

    with mock.patch.object(FusedAdam, "update", broken):
        try:
            step(engine)
        except UpdateFailed:
            return traceback.format_exc()
    raise AssertionError("the step did not fail")


def must_refuse(call: Any, *args: Any) -> None:
    with pytest.raises(UpdateFailed, match="last checkpoint"):
        call(*args)


def main(lane: str) -> None:
    with shared_folder() as folder:
        engine = make_engine(CASE, CASE.blocks[0])
        train(engine, CASE, folder)
        engine.save_checkpoint(str(folder))
        step(engine)

        text = failed_step(engine, lane)
        if dist.get_rank() == 1:
            assert "Broken: out of luck" in text, text
            assert "in broken" in text, text
        else:
            assert "failed on rank 1" in text, text
        must_refuse(step, engine)
        must_refuse(engine.save_checkpoint, str(folder / "torn"))
        must_refuse(engine.save_16bit_model, str(folder / "torn16"))
        assert not list(folder.glob("torn*/**/latest"))
        assert not list(folder.glob("torn16/*.bin"))

        engine.load_checkpoint(str(folder))
        step(engine)
        found = Record()
        collect(engine.optimizer, found)
        resumed = make_engine(CASE, None)
        resumed.load_checkpoint(str(folder))
        step(resumed)
        expected = Record()
        collect(resumed.optimizer, expected)
        assert differences(expected, found) == []
    print("recovered")


if __name__ == "__main__":
    with process_group():
        main(sys.argv[1])
