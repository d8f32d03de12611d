"""Train while a script or the file system disturbs the plugin: training continues with correct results."""

from __future__ import annotations

import gc
import warnings
import weakref
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam

from deep_opt_states.device.kernels.probe_arithmetic import find_arithmetic
from tests.ranks import ranks
from tests.zero.parity.case import STREAMED, STRIDE_2, Case
from tests.zero.parity.parity_model import ParityNet, batch
from tests.zero.parity.training import differences, make_engine, run_variant


def train(engine: Any, case: Case, steps: int) -> None:
    for step in range(steps):
        x, target = batch(case, dist.get_rank(), step, torch.bfloat16)
        engine.backward(engine(x, target, None, 1.0))
        engine.step()
        # If only one rank continued, the other would never reach this barrier.
        dist.barrier()


@ranks(2)
def test_the_default_dtype_of_a_script_does_not_change_the_bits() -> None:
    case = Case(name="default dtype", blocks=(STRIDE_2,), world_size=2, steps=3, clip=0.5)
    for dtype in (torch.bfloat16, torch.float64):
        find_arithmetic.cache_clear()  # each engine behaves as the first one of a process
        torch.set_default_dtype(dtype)
        try:
            stock, ours = run_variant(case, None), run_variant(case, STRIDE_2)
        finally:
            torch.set_default_dtype(torch.float32)
        assert differences(stock, ours) == [], dtype


@ranks(2)
def test_a_report_that_cannot_be_written_is_logged_on_one_rank_and_training_continues() -> None:
    block = {**STREAMED, "report": "/proc/nowhere"}
    case = Case(name="report", blocks=(block,), world_size=2)
    with redirect_stdout(StringIO()) as output:
        train(make_engine(case, block), case, steps=3)
    logged = output.getvalue()
    if dist.get_rank() == 0:
        assert logged.count("deep_optimizer_states.report: the update cannot be reported there") == 1
    else:
        assert "/proc/nowhere" not in logged


@ranks(2)
def test_a_client_scheduler_is_stepped_without_a_warning() -> None:
    """Check that PyTorch does not warn that a scheduler was stepped before its optimizer."""
    case = Case(name="client", blocks=(STRIDE_2,), world_size=2, schedule=False)
    config = case.ds_config(STRIDE_2)
    del config["optimizer"]
    model = ParityNet(case)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=DeepSpeedCPUAdam(model.parameters(), lr=1e-3),
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
            config=config,
        )
        train(engine, case, steps=3)
    assert engine.get_lr() == [1e-3 / 8]
    assert [str(warning.message) for warning in caught if "lr_scheduler" in str(warning.message)] == []


@ranks(2)
def test_destroy_frees_the_staging_slots_and_may_be_called_twice() -> None:
    case = Case(name="destroy", blocks=(STREAMED,), world_size=2)
    engine = make_engine(case, STREAMED)
    train(engine, case, steps=1)
    slots = [weakref.ref(slot.master) for slot in engine.optimizer._running.executor._actions._slots]
    assert slots
    engine.destroy()
    engine.destroy()
    gc.collect()
    assert [slot() for slot in slots] == [None] * len(slots)
