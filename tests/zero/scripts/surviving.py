"""What must not end or disturb training: a script's default dtype, a report that cannot be written, a client's
scheduler, ``destroy``."""

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
from tests.zero.parity.arm import differences, make_engine, run_arm
from tests.zero.parity.case import STREAMED, STRIDE_2, Case
from tests.zero.parity.model import Net, batch
from tests.zero.process_group import process_group

UNWRITABLE = {**STREAMED, "report": "/proc/nowhere"}


def train(engine: Any, case: Case, steps: int) -> None:
    for step in range(steps):
        x, target = batch(case, dist.get_rank(), step, torch.bfloat16)
        engine.backward(engine(x, target, None, 1.0))
        engine.step()
        # Ranks that went on alone would not meet here.
        dist.barrier()


def a_default_dtype_of_the_script() -> None:
    case = Case(name="default dtype", blocks=(STRIDE_2,), world_size=2, steps=3, clip=0.5)
    for dtype in (torch.bfloat16, torch.float64):
        find_arithmetic.cache_clear()  # each stands for the first engine of a process
        torch.set_default_dtype(dtype)
        try:
            found = differences(run_arm(case, None), run_arm(case, STRIDE_2))
        finally:
            torch.set_default_dtype(torch.float32)
        assert found == [], (dtype, found)
    print("trained with another default dtype")


def a_report_that_cannot_be_written() -> None:
    case = Case(name="report", blocks=(UNWRITABLE,), world_size=2)
    train(make_engine(case, UNWRITABLE), case, steps=3)
    print("trained without reports")


def a_client_scheduler_sees_the_steps() -> None:
    """PyTorch's schedulers warn when they are stepped before their optimizer."""
    case = Case(name="client", blocks=(STRIDE_2,), world_size=2, schedule=False)
    config = case.ds_config(STRIDE_2)
    del config["optimizer"]
    model = Net(case)
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
    complaints = [str(warning.message) for warning in caught if "lr_scheduler" in str(warning.message)]
    assert complaints == [], complaints
    print("scheduled without complaint")


def destroy_gives_the_slots_back() -> None:
    case = Case(name="destroy", blocks=(STREAMED,), world_size=2)
    engine = make_engine(case, STREAMED)
    train(engine, case, steps=1)
    slots = [weakref.ref(slot.master) for slot in engine.optimizer._executor._actions._slots]
    assert slots
    engine.destroy()
    engine.destroy()
    gc.collect()
    assert [slot() for slot in slots] == [None] * len(slots)
    print("gave the slots back")


if __name__ == "__main__":
    with process_group():
        a_default_dtype_of_the_script()
        a_report_that_cannot_be_written()
        a_client_scheduler_sees_the_steps()
        destroy_gives_the_slots_back()
