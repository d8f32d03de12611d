"""Check that training goes on as with stock after an allocation on the device has failed.

The memory of the device is lowered to the bytes that are reserved at that moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import ranks
from tests.software_gpu import device
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import LAZY, changed
from tests.zero.on_accelerator import on_accelerator
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import (
    Block,
    Record,
    assert_same_bits,
    closing_engine,
    run_resumed,
    train,
)

CASE = Case(
    name="out of memory",
    blocks=(STRIDE_2,),
    steps=2,
    clip=0.5,
    schedule=False,
    widths=(64, 300, 700, 500, 64),
    sub_group_size=200_000,
)
"""Slots and gradients are larger than the bytes that the caching allocator reserves beyond a request."""

ROWS = 5_000
"""The rows of a batch whose activations do not fit into the memory that training with four rows has reserved."""


@contextmanager
def no_more_memory(while_phase: str, phase: str) -> Iterator[None]:
    """Lower the memory of the device inside this context to the reserved bytes, if ``phase`` is ``while_phase``."""
    if phase != while_phase:
        yield
        return
    device.empty_cache()
    with changed(memory_bytes=device.memory_reserved()):
        yield


def step(engine: Any) -> None:
    x, target = map(on_accelerator, batch(CASE, 0, 7, torch.bfloat16))
    engine.backward(engine(x, target, None, 1.0))
    engine.step()


def error_in(phase: str, engine: Any) -> str:
    """Train one step on a large batch without memory in ``phase``, and return the error's class, or "" without one."""
    generator = torch.Generator().manual_seed(3)
    x, target = (on_accelerator(torch.randn(ROWS, 64, generator=generator).bfloat16()) for _ in range(2))
    try:
        with no_more_memory("forward", phase):
            loss = engine(x, target, None, 1.0)
        with no_more_memory("backward", phase):
            engine.backward(loss)
        with no_more_memory("step", phase):
            engine.step()
    except torch.OutOfMemoryError as error:
        return type(error).__name__
    return ""


def fails_in(phase: str, block: Block, folder: Path) -> tuple[str, bool, Record, Record]:
    """Let a step fail after a checkpoint, train on, then load the checkpoint and train again.

    Return the error, whether an update was in flight when the step began, and the records of both trainings.
    """
    with closing_engine(CASE, block) as engine:
        train(engine, CASE, folder)
        engine.save_checkpoint(str(folder))
        step(engine)
        pending = block is not None and engine.optimizer._running.executor.pending
        error = error_in(phase, engine)
        continued = train(engine, CASE, folder)
        engine.load_checkpoint(str(folder))
        return error, pending, continued, train(engine, CASE, folder)


# ``filled_gpu/test_growing_values.py`` trains on after an allocation that has failed, too.
@pytest.mark.thorough
@pytest.mark.parametrize("phase", ["forward", "backward", "step"])
@ranks(1, group=software_process_group)
def test_a_step_that_runs_out_of_device_memory_leaves_what_stock_leaves(phase: str, tmp_path: Path) -> None:
    """Check that an error in forward or backward is the caller's to handle, and that ``step()`` needs no memory."""
    resumed = run_resumed(CASE, None, None)
    with plugged(LAZY):
        stock, ours = (fails_in(phase, block, tmp_path / name) for name, block in (("stock", None), ("ours", STRIDE_2)))
    expected = "" if phase == "step" else "OutOfMemoryError"
    error, _, continued, _ = stock
    our_error, pending, our_continued, our_resumed = ours
    assert error == our_error == expected
    assert pending, "no update was in flight when the step began"
    assert_same_bits(continued, our_continued)
    assert_same_bits(resumed, our_resumed)
