"""Trains the real engine on CUDA: cases compared with stock, and 200 steps again and again.

Started by tests of this folder; answers with what differs, what gradients moved, what is page-locked, and how much of
the GPU's memory was taken.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

import deep_opt_states  # noqa: F401 (activates where the package is not installed)
from perf_model.prediction.memory import Where
from tests.gpu.one_by_one import Answers, answer_each, run_each
from tests.gpu.time_left import seconds_left
from tests.zero.parity.arm import Record, closing_engine, differences, run_arm, shared_folder, train
from tests.zero.parity.case import CPU, EVERY_PLACEMENT, SERIAL, STREAMED, STRIDE_2, Case
from tests.zero.parity.cases import CASES
from tests.zero.parity.worker import result, same_as_stock
from tests.zero.process_group import process_group
from tests.zero.scripts.gradient_traffic import traffic
from tests.zero.test_gradient_traffic import CASES as TRAFFIC_CASES

OVERLAP = {"overlap_comm": True}

RESIDENTS = {"placement": ["resident"] * 5}
MIXED = {"placement": ["streamed", "resident", "cpu", "resident", "streamed"], "num_slots": 1}

OF_THE_CPU_SUITE = (
    "residents, clipping, reload in process",
    "fp32, Adam, two groups, frozen, accumulation 3",
    "fp16, overflow, clipping",
    "parameters offloaded too",
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
    *(replace(case, zero={**case.zero, **OVERLAP}) for case in CASES if case.name in OF_THE_CPU_SUITE),
)

# Sub-groups of about a million parameters: what is copied takes longer than what is computed.
LONG = Case(
    name="200 steps",
    blocks=(
        {"placement": ["streamed", "cpu", "streamed", "resident", "streamed", "cpu"], "num_slots": 1},
        {**STREAMED, "num_slots": 2},
        STRIDE_2,
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
    return run_arm(PLACEMENTS, None)


def placement(block: dict[str, Any]) -> dict[str, Any]:
    return result(stock_of_placements(), {str(block): run_arm(PLACEMENTS, block)})


@cache
def long_run(number: int | None) -> Record:
    """Train with the block of this number, or with stock, once in a process."""
    return run_arm(LONG, None if number is None else LONG.blocks[number])


def long_against_stock(number: int) -> dict[str, Any]:
    return result(long_run(None), {str(LONG.blocks[number]): long_run(number)})


def long_again() -> dict[str, Any]:
    """The first block, once more."""
    first, again = long_run(0), run_arm(LONG, LONG.blocks[0])
    return {"numbers": first.numbers, "differences": {"again": differences(first, again)}}


LONG_RUNS: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"200 steps, {block}": partial(long_against_stock, number) for number, block in enumerate(LONG.blocks)},
    **{f"200 steps, repetition {repetition}": long_again for repetition in range(1, REPETITIONS)},
}


def page_locked() -> dict[str, Any]:
    """Whether the states in host memory are, while an engine lives and after its ``destroy``; of one engine after
    another."""
    case = Case(name="page-locked", blocks=(STRIDE_2,))
    engines = []
    for _ in range(2):
        with closing_engine(case, STRIDE_2) as engine:
            states = [its for state in engine.optimizer._states for its in vars(state).values() if its is not None]
            on_host = [its for its in states if its.is_cpu]
            alive = [its.is_pinned() for its in on_host]
        # The tensors, which are still here, keep the memory.
        engines.append({"alive": alive, "destroyed": [its.is_pinned() for its in on_host]})
    return {"engines": engines}


WIDE = Case(
    name="peak memory",
    blocks=(CPU, {**STREAMED, "num_slots": 2}, STRIDE_2),
    widths=(2048,) * 9,
    sub_group_size=9_000_000,
    zero={**OVERLAP, "reduce_bucket_size": 5 * 10**6, "stage3_prefetch_bucket_size": 5 * 10**6},
)
"""33 million parameters in eight layers."""


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
            reservations = [] if block is None else engine.optimizer.ledger.reserved
            reserved = [its.count * its.each_bytes for its in reservations if its.where is Where.ACCELERATOR]
        found["stock" if block is None else str(block)] = {"peak_bytes": peak_bytes, "reserved_bytes": sum(reserved)}
    return {"arms": found}


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
    """Start the cases on one GPU. cuBLAS repeats its bits only with a workspace of its own."""
    cuda = {"DS_ACCELERATOR": "cuda", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "4", **changes}
    return run_each(program, names, seconds_left(), **cuda)


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with process_group():
        answer_each(WORK, sys.argv[1:])
