"""Train the real engine on CUDA, in cases that are compared with stock and in repeated runs of 200 steps.

Tests of this folder start this program. It answers with the differences, the bytes that gradients moved, whether the
states are page-locked, and the GPU memory that was used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

import deep_opt_states  # noqa: F401 (activates the plugin if the package is not installed)
from perf_model.prediction.memory import MemoryKind
from tests.gpu.one_by_one import Answers, answer_each, run_each
from tests.gpu.time_left import seconds_left
from tests.zero.gradients.gradient_traffic_ranks import traffic
from tests.zero.gradients.test_gradient_traffic import CASES as TRAFFIC_CASES
from tests.zero.parity.case import CPU, EVERY_PLACEMENT, SERIAL, STREAMED, STRIDE_2, Case, by_sub_group
from tests.zero.parity.case_runs import result, same_as_stock
from tests.zero.parity.cases import CASES
from tests.zero.parity.training import Record, closing_engine, differences, run_variant, shared_folder, train
from tests.zero.process_group import process_group

OVERLAP = {"overlap_comm": True}

RESIDENTS = {"placement": [{"match": "*", "states": "resident"}]}
MIXED = {**by_sub_group("streamed", "resident", "cpu", "resident", "streamed"), "num_slots": 1}

CPU_SUITE_CASES = (
    "residents, clipping, reload in process",
    "fp32, Adam, two groups, frozen, accumulation 3",
    "fp16, overflow, clipping",
    "offloaded parameters",
    "resume",
)

PLACEMENTS = Case(
    name="every placement",
    blocks=(*EVERY_PLACEMENT, RESIDENTS, MIXED, {**MIXED, **SERIAL}, {**STRIDE_2, **SERIAL}),
    clip=0.5,
    zero=OVERLAP,
)
COMPARED = (
    Case(name="planned", blocks=({}, {"gpu_memory_gb": 0.5}), zero=OVERLAP),
    *(replace(case, zero={**case.zero, **OVERLAP}) for case in CASES if case.name in CPU_SUITE_CASES),
)

# Sub-groups have about a million parameters and are cut into a few units, so that copies take longer than kernels.
LONG_UNITS = {"unit_size": 200_000}
LONG = Case(
    name="200 steps",
    blocks=(
        {**by_sub_group("streamed", "cpu", "streamed", "resident", "streamed", "cpu"), "num_slots": 1},
        {**STREAMED, **LONG_UNITS, "num_slots": 2},
        {**STRIDE_2, **LONG_UNITS},
        CPU,
    ),
    steps=200,
    clip=0.5,
    widths=(512, 1024, 1024, 1024, 1024, 512),
    sub_group_size=500_000,
    zero={**OVERLAP, "reduce_bucket_size": 10**6, "stage3_prefetch_bucket_size": 10**6},
)
REPETITIONS = 3


@cache
def stock_of_placements() -> Record:
    """Train ``PLACEMENTS`` with stock, once per process."""
    return run_variant(PLACEMENTS, None)


def placement(block: dict[str, Any]) -> dict[str, Any]:
    """Train ``PLACEMENTS`` with the block, and compare with stock."""
    return result(stock_of_placements(), {str(block): run_variant(PLACEMENTS, block)})


@cache
def long_run(number: int | None) -> Record:
    """Train with the block of this number, or with stock, once per process."""
    return run_variant(LONG, None if number is None else LONG.blocks[number])


def long_against_stock(number: int) -> dict[str, Any]:
    """Compare the long run with the block of this number with stock's."""
    return result(long_run(None), {str(LONG.blocks[number]): long_run(number)})


def long_again() -> dict[str, Any]:
    """Repeat the long run with the first block, and compare both runs."""
    first, again = long_run(0), run_variant(LONG, LONG.blocks[0])
    return {"numbers": first.numbers, "differences": {"again": differences(first, again)}}


LONG_RUNS: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"200 steps, {block}": partial(long_against_stock, number) for number, block in enumerate(LONG.blocks)},
    **{f"200 steps, repetition {repetition}": long_again for repetition in range(1, REPETITIONS)},
}


def page_locked() -> dict[str, Any]:
    """Return for two engines, one after the other, whether their states in host memory are page-locked.

    The states are checked while the engine is alive and after its ``destroy``.
    """
    case = Case(name="page-locked", blocks=(STRIDE_2,))
    engines = []
    for _ in range(2):
        with closing_engine(case, STRIDE_2) as engine:
            tensors = [tensor for state in engine.optimizer._running.memory.units for tensor in vars(state).values()]
            on_host = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.is_cpu]
            alive = [tensor.is_pinned() for tensor in on_host]
        # The references to the tensors keep the memory alive.
        engines.append({"alive": alive, "destroyed": [tensor.is_pinned() for tensor in on_host]})
    return {"engines": engines}


WIDE_UNITS = {"unit_size": 3_000_000}
WIDE = Case(
    name="peak memory",
    blocks=(CPU, {**STREAMED, **WIDE_UNITS, "num_slots": 2}, {**STRIDE_2, **WIDE_UNITS}),
    widths=(2048,) * 9,
    sub_group_size=9_000_000,
    zero={**OVERLAP, "reduce_bucket_size": 5 * 10**6, "stage3_prefetch_bucket_size": 5 * 10**6},
)
"""A case with 33 million parameters in eight layers."""


def peak_memory() -> dict[str, Any]:
    """Return the peak and the reserved GPU memory of stock and of each block."""
    found = {}
    for block in (None, *WIDE.blocks):
        torch.cuda.empty_cache()
        before_bytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with shared_folder() as folder, closing_engine(WIDE, block) as engine:
            train(engine, WIDE, folder)
            peak_bytes = torch.cuda.max_memory_allocated() - before_bytes
            reservations = [] if block is None else engine.optimizer.accounting_device.reserved
            on_gpu = [reservation for reservation in reservations if reservation.kind is MemoryKind.ACCELERATOR]
            reserved_bytes = sum(reservation.count * reservation.each_bytes for reservation in on_gpu)
        found["stock" if block is None else str(block)] = {"peak_bytes": peak_bytes, "reserved_bytes": reserved_bytes}
    return {"variants": found}


TRAFFIC, PAGE_LOCKED = "gradient traffic", "page-locked"

WORK: dict[str, Callable[[], dict[str, Any]]] = {
    **{str(block): partial(placement, block) for block in PLACEMENTS.blocks},
    **{case.name: partial(same_as_stock, case) for case in COMPARED},
    **LONG_RUNS,
    TRAFFIC: lambda: {"cases": [traffic(None, *case) for case in TRAFFIC_CASES]},
    PAGE_LOCKED: page_locked,
    WIDE.name: peak_memory,
}


def trained(names: Sequence[str], program: Sequence[str] = ("-m", "tests.gpu.engine"), **changes: str) -> Answers:
    """Run the cases on one GPU. cuBLAS is only reproducible with a configured workspace."""
    cuda = {"DS_ACCELERATOR": "cuda", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "4", **changes}
    return run_each(program, names, seconds_left(), **cuda)


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with process_group():
        answer_each(WORK, sys.argv[1:])
