"""Rank 1's update fails, on the lane given; every rank stops, none hangs, and all recover from the checkpoint.

Arguments: the lanes. Each is tried for an update that ends in ``step()``, and for one that goes on in the next forward:
there nobody stops before all ranks do, at the first that uses or keeps what is torn.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param

from deep_opt_states.device.kernels.adam import PartUpdate
from deep_opt_states.runtime.executor import UpdateFailed
from deep_opt_states.zero.step import update
from perf_model.schedule.placement import Placement
from tests.kernels.intercepted import before_each_update
from tests.zero.parity.arm import Block, Record, collect, differences, make_engine, shared_folder, train
from tests.zero.parity.case import AT_ONCE, STRIDE_2, Case
from tests.zero.parity.model import batch
from tests.zero.process_group import process_group
from tests.zero.scripts.delayed import logged

CASE = Case(
    name="failing",
    blocks=(STRIDE_2, {**STRIDE_2, **AT_ONCE}),
    world_size=2,
    steps=2,
    clip=0.5,
    schedule=False,
    zero={"stage3_gather_16bit_weights_on_model_save": True},
)


class Broken(Exception):
    pass


def forward(engine: Any) -> Any:
    x, target = batch(CASE, dist.get_rank(), 7, torch.bfloat16)
    return engine(x, target, None, 1.0)


def finish_step(engine: Any, loss: torch.Tensor) -> None:
    engine.backward(loss)
    engine.step()


def step(engine: Any) -> None:
    finish_step(engine, forward(engine))


def evaluate(engine: Any) -> None:
    with torch.no_grad():
        forward(engine)


def gather(engine: Any) -> None:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        pass


@contextmanager
def broken(engine: Any, lane: str) -> Iterator[None]:
    """Rank 1 fails at its second update on ``lane``, of what is not updated first; not in an update from before."""
    engine.optimizer._update.finish()
    placement = {"cpu": Placement.CPU, "compute": Placement.STREAMED}[lane]
    placements = engine.optimizer.plan.placements
    victim = [index for index, its in enumerate(placements) if its is placement][1]
    rest = engine.optimizer._executor._splits[victim].rest[0]

    def breaks(update: PartUpdate) -> None:
        if dist.get_rank() == 1 and update.sub_group == victim and update.part == rest:
            raise Broken("out of luck")

    with before_each_update(breaks):
        yield


def must_refuse(call: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(UpdateFailed, match="last checkpoint"):
        call(*args)


def told(call: Callable[[], Any]) -> None:
    """Every rank stops there, and says what has failed and where."""
    try:
        call()
    except UpdateFailed:
        text = traceback.format_exc()
    else:
        raise AssertionError("nothing failed")
    assert "last checkpoint" in text, text
    if dist.get_rank() == 1:
        assert "Broken: out of luck" in text, text
        assert "in breaks" in text, text
    else:
        assert "failed on rank 1" in text, text


def must_recover(engine: Any, folder: Path) -> None:
    """Nothing of the torn states is used or saved, and the checkpoint brings stock's bits."""
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
    resumed.destroy()


@contextmanager
def trained(block: Block) -> Iterator[tuple[Any, Path]]:
    """An engine with a checkpoint, and a step after it."""
    with shared_folder() as folder:
        engine = make_engine(CASE, block)
        train(engine, CASE, folder)
        engine.save_checkpoint(str(folder))
        step(engine)
        yield engine, folder
        engine.destroy()


def fails_in_step(lane: str) -> None:
    with trained({**STRIDE_2, **AT_ONCE}) as (engine, folder):
        with broken(engine, lane):
            told(lambda: step(engine))
        must_recover(engine, folder)


def fails_in_forward(lane: str) -> None:
    stops: dict[str, Callable[[Any, Path], Any]] = {
        "step": lambda engine, _: step(engine),
        "save_checkpoint": lambda engine, folder: engine.save_checkpoint(str(folder / "torn")),
        "save_16bit_model": lambda engine, folder: engine.save_16bit_model(str(folder / "torn16")),
        "eval": lambda engine, _: evaluate(engine),
        "gather": lambda engine, _: gather(engine),
        "safe_get_full": lambda engine, _: safe_get_full_fp32_param(next(engine.module.parameters())),
    }
    with trained(STRIDE_2) as (engine, folder):
        # Rank 1's collectives are those of a forward without a failure, until all ranks stop.
        whole: list[str] = []
        engine.optimizer._update.finish()
        with logged(whole):
            step(engine)
            loss = forward(engine)
        finish_step(engine, loss)
        broke: list[str] = []
        with broken(engine, lane), logged(broke):
            step(engine)
            loss = forward(engine)
        assert broke == whole
        assert len(whole) > 10
        told(lambda: finish_step(engine, loss))
        must_recover(engine, folder)
        for name, stop in stops.items():
            with broken(engine, lane):
                step(engine)
                told(lambda stop=stop: stop(engine, folder))
            assert engine.optimizer._update.failed, name
            engine.load_checkpoint(str(folder))
        assert not engine.optimizer._executor.failed_within(0), "a failure is remembered that was mended"
        step(engine)
        with broken(engine, lane), mock.patch.object(update, "say_error") as said:
            step(engine)
            engine.destroy()
        assert said.called == (dist.get_rank() == 1), "nobody was told of the last update"


def main(lanes: list[str]) -> None:
    for lane in lanes:
        fails_in_step(lane)
        fails_in_forward(lane)
        print(f"recovered on {lane}")


if __name__ == "__main__":
    with process_group():
        main(sys.argv[1:])
