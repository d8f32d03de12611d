"""Trains the real engine on CUDA, one rank: cases compared with stock, and 200 steps again and again.

Started by ``test_engine.py``; answers with what differs, with what gradients moved, and with what is page-locked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import deep_opt_states  # noqa: F401 (activates where the package is not installed)
from tests.launch import answer
from tests.zero.parity.arm import closing_engine, differences, run_arm
from tests.zero.parity.case import CPU, EVERY_PLACEMENT, SERIAL, STREAMED, STRIDE_2, Case
from tests.zero.parity.cases import CASES
from tests.zero.parity.worker import same_as_stock
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

COMPARED = (
    Case(
        name="every placement",
        blocks=(*EVERY_PLACEMENT, RESIDENTS, MIXED, {**MIXED, **SERIAL}, {**STRIDE_2, **SERIAL}),
        clip=0.5,
        zero=OVERLAP,
    ),
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


def long_runs() -> dict[str, Any]:
    """The first block's runs against its first; each block's first against stock."""
    stock = run_arm(LONG, None)
    found: dict[str, list[str]] = {}
    for number, block in enumerate(LONG.blocks):
        first = run_arm(LONG, block)
        found[f"{block} against stock"] = differences(stock, first)
        for repetition in range(1, REPETITIONS if number == 0 else 1):
            found[f"{block}, repetition {repetition}"] = differences(first, run_arm(LONG, block))
    return {"numbers": stock.numbers, "stock class": stock.optimizer_class, "differences": found}


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


TRAFFIC, PAGE_LOCKED = "gradient traffic", "page-locked"

WORK: dict[str, Callable[[], dict[str, Any]]] = {
    **{case.name: lambda case=case: same_as_stock(case) for case in COMPARED},
    LONG.name: long_runs,
    TRAFFIC: lambda: {"cases": [traffic(*case) for case in TRAFFIC_CASES]},
    PAGE_LOCKED: page_locked,
}


def main(names: list[str]) -> None:
    for name in names:
        answer({"name": name, **WORK[name]()})


if __name__ == "__main__":
    with process_group():
        main(sys.argv[1:])
