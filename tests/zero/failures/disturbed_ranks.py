"""Train while a script or the file system disturbs the plugin, and check that training continues with correct results.

The disturbances are a default dtype, a report that cannot be written and a client's scheduler. ``destroy`` must free
the staging slots.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam

from deep_opt_states.device.kernels.probe_arithmetic import find_arithmetic
from tests.zero.parity.case import STREAMED, STRIDE_2, Case
from tests.zero.parity.parity_model import ParityNet, batch
from tests.zero.parity.training import differences, make_engine, run_variant
from tests.zero.process_group import process_group

UNWRITABLE = {**STREAMED, "report": "/proc/nowhere"}


def train(engine: Any, case: Case, steps: int) -> None:
    for step in range(steps):
        x, target = batch(case, dist.get_rank(), step, torch.bfloat16)
        engine.backward(engine(x, target, None, 1.0))
        engine.step()
        # If only one rank continued, the other would never reach this barrier.
        dist.barrier()


def train_with_another_default_dtype() -> None:
    """Check that the default dtype of a script does not change the bits."""
    case = Case(name="default dtype", blocks=(STRIDE_2,), world_size=2, steps=3, clip=0.5)
    for dtype in (torch.bfloat16, torch.float64):
        find_arithmetic.cache_clear()  # each engine behaves as the first one of a process
        torch.set_default_dtype(dtype)
        try:
            found = differences(run_variant(case, None), run_variant(case, STRIDE_2))
        finally:
            torch.set_default_dtype(torch.float32)
        assert found == [], (dtype, found)
    print("trained with another default dtype")


def train_with_an_unwritable_report() -> None:
    """Check that training continues if the report cannot be written."""
    case = Case(name="report", blocks=(UNWRITABLE,), world_size=2)
    train(make_engine(case, UNWRITABLE), case, steps=3)
    print("trained without reports")


def train_with_a_client_scheduler() -> None:
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
    assert engine.get_lr() == [1e-3 / 8], engine.get_lr()
    scheduler_warnings = [str(warning.message) for warning in caught if "lr_scheduler" in str(warning.message)]
    assert scheduler_warnings == [], scheduler_warnings
    print("scheduled without a warning")


def destroy_frees_the_staging_slots() -> None:
    """Check that ``destroy`` frees the staging slots, and that it may be called twice."""
    case = Case(name="destroy", blocks=(STREAMED,), world_size=2)
    engine = make_engine(case, STREAMED)
    train(engine, case, steps=1)
    slots = [weakref.ref(slot.master) for slot in engine.optimizer._running.executor._actions._slots]
    assert slots
    engine.destroy()
    engine.destroy()
    gc.collect()
    assert [slot() for slot in slots] == [None] * len(slots)
    print("freed the staging slots")


if __name__ == "__main__":
    with process_group():
        train_with_another_default_dtype()
        train_with_an_unwritable_report()
        train_with_a_client_scheduler()
        destroy_frees_the_staging_slots()
