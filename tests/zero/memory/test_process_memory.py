"""Compare the memory model with the reservations of the runtime and with the memory of a real engine's process."""

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import deepspeed
import psutil
import pytest
import torch
from deepspeed.utils import safe_get_full_grad

from perf_model.prediction import memory
from perf_model.schedule.host_layout import Widths
from tests.ranks import on_ranks
from tests.zero.parity.case import CPU, Case
from tests.zero.parity.training import Block

WIDTH, LAYERS = 2048, 6


def rss_bytes() -> int:
    return psutil.Process().memory_info().rss


def peak_bytes() -> int:
    """Return the most resident memory since 5 was written to ``clear_refs``."""
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


def return_freed_memory() -> None:
    mallopt, trim_threshold, mmap_threshold, arena_max = ctypes.CDLL(None).mallopt, -1, -3, -8
    for option, value in ((trim_threshold, 0), (mmap_threshold, 65536), (arena_max, 1)):
        assert mallopt(option, value) == 1


CASE = Case(
    name="memory",
    blocks=(CPU,),
    schedule=False,
    sub_group_size=WIDTH * WIDTH,
    zero={
        "stage3_max_live_parameters": 0,
        "stage3_prefetch_bucket_size": 0,
        # On the CPU accelerator the bucket is also host memory. It is allocated after the peak.
        "reduce_bucket_size": WIDTH * WIDTH,
    },
)


def memory_of_training(block: Block) -> dict[str, Any]:
    """Train weights of whole pages, of which none is gathered ahead, and return the memory of the process."""
    return_freed_memory()
    # Biases would begin sub-groups in the middle of a page.
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    Path("/proc/self/clear_refs").write_text("5")
    found: dict[str, Any] = {"before": rss_bytes()}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CASE.ds_config(block))
    found["peak"] = peak_bytes()
    for _ in range(2):
        engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().square().mean())
        for param in model.parameters():
            safe_get_full_grad(param)
        engine.step()
    gc.collect()
    found["rss"] = rss_bytes()
    if block is not None:
        found["plan"] = engine.optimizer.plan
        found["reserved"] = bytes_by_kind(engine.optimizer.accounting_device.reserved)
        engine.destroy()
        gc.collect()
        found["destroyed"] = rss_bytes()
    return found


def bytes_by_kind(reservations: Iterable[memory.Reservation]) -> Counter[memory.MemoryKind]:
    found: Counter[memory.MemoryKind] = Counter()
    for item in reservations:
        found[item.kind] += item.count * item.each_bytes
    return found


def test_the_predicted_memory_is_reserved_and_used_by_the_process() -> None:
    """Check the CPU accelerator, where all takes 14 bytes per parameter, and stock 18. A GPU needs 16."""
    stock, ours = (on_ranks(1, memory_of_training, block)[0] for block in (None, CPU))
    plan = ours["plan"]
    assert len(plan.placements) == LAYERS
    setup = memory.TrainingSetup(widths=Widths(param=2, grad=2, publishes=False))
    predicted = bytes_by_kind(memory.reserved_by_the_runtime(plan, setup))
    numel = LAYERS * WIDTH * WIDTH
    assert ours["reserved"] == predicted == Counter({memory.MemoryKind.PINNED: 14 * numel})

    # On the CPU accelerator all reservations are host memory of exactly these sizes. They replace stock's states.
    growth = predicted.total() - bytes_by_kind(memory.reserved_by_stock(plan)).total()
    assert growth == -4 * numel < -50e6, "the difference exceeds the noise of a process"
    assert ours["rss"] - stock["rss"] == pytest.approx(growth, abs=12e6)
    # Destroying the engine frees all of it, and buffers of DeepSpeed.
    assert ours["rss"] - ours["destroyed"] >= predicted.total() - 12e6
    # While the states are created, only one sub-group's, in the dtype of the model, are allocated temporarily.
    assert ours["peak"] - ours["before"] <= 1.05 * (ours["rss"] - ours["before"])
