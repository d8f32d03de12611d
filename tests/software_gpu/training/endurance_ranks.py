"""Train many steps on the device, and measure whether the process keeps more and more memory or files.

Every ``PERIOD`` steps, after a save and a load and with the same plan, everything is counted that the process keeps.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from perf_model.schedule.plan import UpdatePlan
from tests.software_gpu import device
from tests.software_gpu.device import DeviceRuntime
from tests.software_gpu.plugged import plugged
from tests.zero.on_accelerator import on_accelerator
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import closing_engine, shared_folder
from tests.zero.random_plans import MoveCounts, random_moves

CASE = Case(name="endurance", blocks=(STRIDE_2,), clip=0.5, schedule=False)
PERIOD = 20
MOVES_SHARE, SKIPPED_SHARE, EVALUATED_SHARE = 0.1, 0.02, 0.05

LEAK_EVERY = 10
LEAKED_NUMEL = 256
"""A leak is one tensor of fp32 of so many elements, or one file, after so many steps."""

LIMITS = {
    **dict.fromkeys(
        ("host memory, bytes", "accelerator memory, bytes", "page-locked memory, bytes"),
        LEAKED_NUMEL * 4 / LEAK_EVERY / 2,
    ),
    **dict.fromkeys(
        ("tensors", "open files", "temporary files", "shared memory, files", "threads"), 1 / LEAK_EVERY / 2
    ),
}
"""The largest growth per step of each quantity: half of a leak's."""

WARM_UP_STEPS = 1_000
MALLINFO2 = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


def allocated_bytes() -> int:
    fields = [(name, ctypes.c_size_t) for name in MALLINFO2.split()]
    statistics = ctypes.CDLL(None).mallinfo2
    statistics.restype = type("MallocStatistics", (ctypes.Structure,), {"_fields_": fields})
    found = statistics()
    return int(found.uordblks + found.hblkhd)


@contextmanager
def counted_page_locks() -> Iterator[dict[int, int]]:
    locked: dict[int, int] = {}

    class CountingRuntime(DeviceRuntime):
        def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
            code = super().cudaHostRegister(address, size_bytes, flags)
            if code == 0:
                locked[address] = size_bytes
            return code

        def cudaHostUnregister(self, address: int) -> int:
            locked.pop(address, None)
            return super().cudaHostUnregister(address)

    with mock.patch.object(device, "cudart", CountingRuntime):
        yield locked


def counted(page_locked: dict[int, int]) -> dict[str, float]:
    gc.collect()
    return {
        "host memory, bytes": allocated_bytes(),
        "accelerator memory, bytes": device.memory_allocated(),
        "page-locked memory, bytes": sum(page_locked.values()),
        "tensors": sum(issubclass(type(kept), torch.Tensor) for kept in gc.get_objects()),
        "open files": len(os.listdir("/proc/self/fd")),
        "temporary files": sum(1 for _ in Path(tempfile.gettempdir()).rglob("*")),
        "shared memory, files": len(list(Path("/dev/shm").glob(f"*_{os.environ['MASTER_PORT']}_*"))),
        "threads": threading.active_count(),
    }


LEAKS: dict[str, Callable[[], object]] = {
    "host": lambda: torch.ones(LEAKED_NUMEL),
    "accelerator": lambda: on_accelerator(torch.ones(LEAKED_NUMEL)),
    "open file": lambda: os.open(os.devnull, os.O_RDONLY),
    "temporary file": lambda: tempfile.mkstemp()[0],
}


def train(engine: Any, step: int, rng: random.Random) -> None:
    x, target = (on_accelerator(tensor) for tensor in batch(CASE, dist.get_rank(), step % 100, torch.bfloat16))
    # Units may not move after a skipped step, whose prefetches are still in their slots.
    is_skipped = rng.random() < SKIPPED_SHARE and step % PERIOD != PERIOD - 1
    engine.backward(engine(x, target, 1.0, math.inf if is_skipped else 1.0))
    engine.step()
    if rng.random() < EVALUATED_SHARE:
        engine.eval()
        with torch.no_grad():
            engine(x, target, 1.0, 1.0)
        engine.train()


def save_and_load(engine: Any, folder: Path, plan: UpdatePlan) -> None:
    engine.save_checkpoint(str(folder), tag="tag")
    engine.load_checkpoint(str(folder))
    engine.optimizer._before_eviction()
    engine.optimizer._running.adopt(plan)
    assert engine.optimizer._running.restore()
    device.synchronize()


def growth_of(samples: list[float]) -> float:
    quarter = max(1, len(samples) // 4)
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    # The medians are in the middle of their quarters.
    return (median(late) - median(early)) / (PERIOD * (len(samples) - 2 * quarter))


def grown(seed: int, steps: int, leak: str) -> dict[str, float]:
    """Return what grows, with a kind of leak, "every" or "none"."""
    kept: list[Any] = []
    rng, samples = random.Random(seed), []
    with (
        shared_folder() as folder,
        mock.patch.object(tempfile, "tempdir", str(folder)),
        counted_page_locks() as page_locked,
        plugged(),
        random_moves(seed, MoveCounts(), change_after=MOVES_SHARE),
        closing_engine(CASE, CASE.blocks[0]) as engine,
    ):
        plan = engine.optimizer.plan
        for step in range(steps):
            train(engine, step, rng)
            if step % LEAK_EVERY == 0:
                kept += [one_more() for kind, one_more in LEAKS.items() if leak in (kind, "every")]
            if step % PERIOD == PERIOD - 1:
                save_and_load(engine, folder / "saved", plan)
                samples.append(counted(page_locked))
        growth = {name: growth_of([sample[name] for sample in samples]) for name in samples[0]}
        # Host memory grows in the first steps, also with stock: it is judged if the second quarter is later.
        judged = set(LIMITS) - (set() if steps >= 4 * WARM_UP_STEPS else {"host memory, bytes"})
        return {name: growth[name] for name in judged if growth[name] > LIMITS[name]}
