"""Let rank 1 fail: every rank stops, none hangs, all recover from a checkpoint, and no thread stays bound."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import safe_get_full_fp32_param

from deep_opt_states.config import Config
from deep_opt_states.device.kernels.adam import RangeUpdate
from deep_opt_states.host.cores import CoreShare
from deep_opt_states.runtime.failure import UpdateFailed
from deep_opt_states.runtime.state_memory import StateMemory
from deep_opt_states.zero.internals.agreement import RanksDisagree
from deep_opt_states.zero.start import assembly
from deep_opt_states.zero.start.devices import AcceleratorChoice
from deep_opt_states.zero.start.node_share import share_cores
from perf_model.schedule.placement import Placement
from tests.forked_child import affinities
from tests.kernels.intercepted import before_each_update
from tests.ranks import ranks
from tests.zero.parity.case import CPU, STRIDE_2, WITHOUT_FORWARD_OVERLAP, Case, eager
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import (
    Block,
    assert_same_bits,
    closing_engine,
    make_engine,
    shared_folder,
    train,
    wait_for_speculations,
)
from tests.zero.races.delayed_ranks import logged_collectives

CASE = Case(
    name="failing",
    blocks=(STRIDE_2, {**STRIDE_2, **WITHOUT_FORWARD_OVERLAP}),
    world_size=2,
    steps=2,
    clip=0.5,
    schedule=False,
    zero={"stage3_gather_16bit_weights_on_model_save": True},
)


class InjectedFailure(Exception):
    pass


def forward(engine: Any) -> Any:
    x, target = batch(CASE, dist.get_rank(), 7, torch.bfloat16)
    return engine(x, target, None, 1.0)


def step(engine: Any, loss: torch.Tensor | None = None) -> None:
    engine.backward(forward(engine) if loss is None else loss)
    engine.step()


def evaluate(engine: Any) -> None:
    with torch.no_grad():
        forward(engine)


def gather(engine: Any) -> None:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        pass


@contextmanager
def failing_update(engine: Any, lane: str) -> Iterator[None]:
    """Let rank 1 fail in the updates inside the block, at the first range of the second unit of ``lane``."""
    engine.optimizer._update.wait()
    placement = {"cpu": Placement.CPU, "compute": Placement.STREAMED}[lane]
    placements = engine.optimizer.plan.placements
    victim = [index for index, candidate in enumerate(placements) if candidate is placement][1]
    part = engine.optimizer._running.memory.units[victim].parts[0]

    def fail_on_rank_1(update: RangeUpdate) -> None:
        if dist.get_rank() == 1 and (update.sub_group, update.element_range) == (part.sub_group, part.elements):
            raise InjectedFailure("by this test")

    with before_each_update(fail_on_rank_1):
        yield


@contextmanager
def failing_method(owner: Any, name: str) -> Iterator[None]:
    original = getattr(owner, name)

    def fail_on_rank_1(*args: Any) -> Any:
        if dist.get_rank() == 1:
            raise InjectedFailure("by this test")
        return original(*args)

    with mock.patch.object(owner, name, fail_on_rank_1):
        yield


def must_refuse(call: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(UpdateFailed, match="last checkpoint"):
        call(*args)


def must_raise_everywhere(call: Callable[[], Any]) -> None:
    with pytest.raises(UpdateFailed) as failed:
        call()
    text = "".join(traceback.format_exception(failed.value))
    of_rank_1, of_others = ("InjectedFailure: by this test", "in fail_on_rank_1"), ("rank 1 cannot continue",)
    parts = ("last checkpoint", *(of_rank_1 if dist.get_rank() == 1 else of_others))
    assert all(part in text for part in parts), text


def must_recover(engine: Any, folder: Path) -> None:
    must_refuse(step, engine)
    must_refuse(engine.save_checkpoint, str(folder / "inconsistent"))
    must_refuse(engine.save_16bit_model, str(folder / "inconsistent16"))
    assert not list(folder.glob("inconsistent*/**/latest"))
    assert not list(folder.glob("inconsistent16/*.bin"))
    engine.load_checkpoint(str(folder))
    step(engine)
    with closing_engine(CASE, None) as resumed:
        resumed.load_checkpoint(str(folder))
        step(resumed)
        assert_same_bits(resumed, engine)


@contextmanager
def trained(block: Block) -> Iterator[tuple[Any, Path]]:
    with shared_folder() as folder, closing_engine(CASE, block) as engine:
        train(engine, CASE, folder)
        engine.save_checkpoint(str(folder))
        step(engine)
        yield engine, folder


def backward_with_failure(engine: Any) -> None:
    loss = forward(engine)
    with failing_update(engine, "cpu"):
        engine.backward(loss)
        failures = [type(error) for error in wait_for_speculations(engine) if error is not None]
    assert failures == [InjectedFailure] * dist.get_rank(), failures


def share_bound_cores(config: Config, accelerator: AcceleratorChoice) -> CoreShare:
    """Bind threads as on CUDA: the update to the last of this rank's CPUs, all other threads to the first."""
    cpus = sorted(os.sched_getaffinity(0))
    return replace(share_cores(config, accelerator), threads=1, cores=(cpus[-1],), launch_cores=(cpus[0],))


LANES = ("cpu", "compute")


def test_the_failures_of_several_ranks_are_named() -> None:
    assert str(UpdateFailed.on_ranks(["OSError: a", "", "E: b"])) == (
        "rank 0 cannot continue: OSError: a; rank 2 cannot continue: E: b"
    )


@pytest.mark.P6
@ranks(2)
def test_a_failed_update_in_step_raises_on_every_rank() -> None:
    with trained({**STRIDE_2, **WITHOUT_FORWARD_OVERLAP}) as (engine, folder):
        for lane in LANES:
            with failing_update(engine, lane):
                must_raise_everywhere(lambda: step(engine))
            must_recover(engine, folder)


@pytest.mark.P6
@ranks(2)
def test_a_failed_update_in_flight_stops_every_rank_at_the_first_use_of_the_states() -> None:
    stops: dict[str, Callable[[Any, Path], Any]] = {
        "step": lambda engine, _: step(engine),
        "save_checkpoint": lambda engine, folder: engine.save_checkpoint(str(folder / "inconsistent")),
        "save_16bit_model": lambda engine, folder: engine.save_16bit_model(str(folder / "inconsistent16")),
        "eval": lambda engine, _: evaluate(engine),
        "gather": lambda engine, _: gather(engine),
        "safe_get_full": lambda engine, _: safe_get_full_fp32_param(next(engine.module.parameters())),
    }
    with trained(STRIDE_2) as (engine, folder):
        # Until all ranks stop, rank 1's collectives must be the same as in a forward without a failure.
        complete: list[str] = []
        engine.optimizer._update.wait()
        with logged_collectives(complete):
            step(engine)
            loss = forward(engine)
        step(engine, loss)
        assert len(complete) > 10
        for lane in LANES:
            failing: list[str] = []
            with failing_update(engine, lane), logged_collectives(failing):
                step(engine)
                loss = forward(engine)
            assert failing == complete
            must_raise_everywhere(lambda loss=loss: step(engine, loss))
            must_recover(engine, folder)
        for lane, (name, stop) in zip(cycle(LANES), stops.items(), strict=False):
            with failing_update(engine, lane):
                step(engine)
                must_raise_everywhere(lambda stop=stop: stop(engine, folder))
            assert engine.optimizer._update.failed, name
            engine.load_checkpoint(str(folder))
        assert not engine.optimizer._running.executor.failed_within(0), "remembered after a checkpoint was loaded"
        step(engine)
        with failing_update(engine, "cpu"), mock.patch("deep_opt_states.log.error") as log_error:
            step(engine)
            engine.destroy()
        assert log_error.called == (dist.get_rank() == 1), "the last update's failure must be logged on rank 1 only"


@pytest.mark.P6
@ranks(2)
def test_a_failure_between_two_updates_stops_every_rank_and_a_checkpoint_recovers() -> None:
    with trained({**STRIDE_2, **WITHOUT_FORWARD_OVERLAP}) as (engine, folder):
        executor = engine.optimizer._running.executor
        with failing_method(executor._issuer, "prefetch"):
            must_raise_everywhere(lambda: step(engine))
        must_recover(engine, folder)
        # The memory for gradients that the user has set may not suffice on one rank.
        with failing_method(engine.optimizer._gradients, "grads_for_update"):
            must_raise_everywhere(lambda: step(engine))
        must_recover(engine, folder)
        param = next(engine.module.parameters())
        with failing_method(executor._elsewhere, "write_back"):
            must_raise_everywhere(lambda: safe_get_full_fp32_param(param))
        must_recover(engine, folder)


@pytest.mark.P6
@ranks(2)
def test_a_failed_speculation_in_backward_counts_only_if_its_step_is_kept() -> None:
    with trained(eager(CPU)) as (engine, folder), trained(None) as (stock, _):
        # The norm of every step is larger than ``CASE.clip``: the speculated step is void.
        backward_with_failure(engine)
        engine.step()
        step(engine)
        for _ in range(2):
            step(stock)
        assert_same_bits(stock, engine)
        engine.optimizer.clip_grad = 0.0
        backward_with_failure(engine)
        engine.step()
        must_raise_everywhere(lambda: evaluate(engine))
        engine.optimizer.clip_grad = CASE.clip
        must_recover(engine, folder)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs to move threads between")
@ranks(2)
def test_an_engine_that_fails_to_initialize_leaves_no_thread_bound() -> None:
    """Let rank 1 fail after threads were bound and memory was allocated, then ``destroy`` on both ranks."""
    free = {*affinities().values()}
    with mock.patch.object(assembly, "share_cores", share_bound_cores):
        failure = RanksDisagree if dist.get_rank() == 0 else InjectedFailure
        with failing_method(StateMemory, "lock"), pytest.raises(failure, match="by this test"):
            make_engine(CASE, STRIDE_2)
        assert {*affinities().values()} == free
        engine = make_engine(CASE, STRIDE_2)
    assert {*affinities().values()} != free
    optimizer = engine.optimizer
    failing = mock.patch.object(DeepSpeedZeroOptimizer_Stage3, "destroy", side_effect=InjectedFailure)
    with failing, pytest.raises(InjectedFailure):
        optimizer.destroy()
    assert {*affinities().values()} == free
    assert not optimizer.optimizer.state
