"""Test the real engine on CUDA with ``overlap_comm``: every kind of training has stock's bits.

All copies use page-locked memory. ``parts.py`` selects the tests of a part by
the words "placements" and "long".
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from perf_model.schedule.workload import STATES
from tests.gpu.parts import seconds_left
from tests.ranks import on_ranks, once
from tests.zero.parity.case import CPU, EVERY_PLACEMENT, RESIDENT, SERIAL, STREAMED, STRIDE_2, Case, by_sub_group
from tests.zero.parity.cases import CASES
from tests.zero.parity.training import closing_engine, differences, result, run_variant, same_as_stock
from tests.zero.process_group import process_group

PLUGIN, STOCK = "DeepOptimizerStates_Stage3", "DeepSpeedZeroOptimizer_Stage3"
CUDA = {"DS_ACCELERATOR": "cuda", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "4"}
"""The variables of the ranks. cuBLAS is only reproducible with a configured workspace."""

OVERLAP = {"overlap_comm": True}
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
    blocks=(*EVERY_PLACEMENT, RESIDENT, MIXED, {**MIXED, **SERIAL}, {**STRIDE_2, **SERIAL}),
    clip=0.5,
    zero=OVERLAP,
)
COMPARED = (
    Case(name="planned", blocks=({}, {"gpu_memory_gb": 0.5}), zero=OVERLAP),
    *(replace(case, zero={**case.zero, **OVERLAP}) for case in CASES if case.name in CPU_SUITE_CASES),
)
TWO_RANKS = Case(name="2 ranks", blocks=(CPU, STREAMED, STRIDE_2), world_size=2, clip=0.5, zero=OVERLAP)

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


# The functions of this part run on a rank, in a process that initializes CUDA.

stock_of_placements = once(partial(run_variant, PLACEMENTS, None))


def placement(block: dict[str, Any]) -> dict[str, Any]:
    """Train ``PLACEMENTS`` with the block, and compare with stock."""
    return result(stock_of_placements(), {str(block): run_variant(PLACEMENTS, block)})


@once
def long_run(number: int | None) -> Any:
    """Train with the block of this number, or with stock."""
    return run_variant(LONG, None if number is None else LONG.blocks[number])


def long_against_stock(number: int) -> dict[str, Any]:
    """Compare the long run with the block of this number with stock's."""
    return result(long_run(None), {str(LONG.blocks[number]): long_run(number)})


def long_again() -> dict[str, Any]:
    """Repeat the long run with the first block, and compare both runs."""
    again = run_variant(LONG, LONG.blocks[0])
    return {"numbers": again.numbers, "differences": {"again": differences(long_run(0), again)}}


def page_locked() -> list[list[bool]]:
    """Return for two engines, in turn, whether their states in host memory are page-locked, and after ``destroy``."""
    found = []
    for _ in range(2):
        with closing_engine(Case(name="page-locked", blocks=(STRIDE_2,)), STRIDE_2) as engine:
            parts = [part for unit in engine.optimizer._running.memory.units for part in unit.parts]
            tensors = [getattr(part, name) for part in parts for name in STATES]
            on_host = [tensor for tensor in tensors if tensor.is_cpu]
            found.append([tensor.is_pinned() for tensor in on_host])
        # The references to the tensors keep the memory alive.
        found.append([tensor.is_pinned() for tensor in on_host])
    return found


GROUPS: dict[str, dict[str, Callable[[], Any]]] = {
    "placements": {str(block): partial(placement, block) for block in PLACEMENTS.blocks},
    "long": {
        **{f"200 steps, {block}": partial(long_against_stock, number) for number, block in enumerate(LONG.blocks)},
        **{f"200 steps, repetition {repetition}": long_again for repetition in (1, 2)},
    },
    "engine": {
        **{case.name: partial(same_as_stock, case) for case in COMPARED},
        "page-locked": page_locked,
    },
}
"""The cases that share a process, since starting one takes seconds."""


def results_of(group: str) -> dict[str, Any]:
    """Return the result of each case of the group, or its traceback."""
    found: dict[str, Any] = {}
    for name, work in GROUPS[group].items():
        try:
            found[name] = work()
        except Exception:  # noqa: BLE001 (the case's test fails with it)
            found[name] = traceback.format_exc()
    return found


@contextmanager
def on_own_gpu() -> Iterator[None]:
    """Run a rank in a process group, on the GPU of its number."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with process_group():
        yield


def on_gpus(world_size: int, function: Callable[..., Any], *arguments: Any, **changes: str) -> list[Any]:
    """Call the function on ranks with GPUs, and return the results."""
    # A forked process could not use CUDA if the process that it is forked from has initialized it.
    options: dict[str, Any] = {"timeout_s": seconds_left(), "fresh": True, "group": on_own_gpu, **CUDA, **changes}
    return on_ranks(world_size, function, *arguments, **options)


@once
def results_on_gpu(group: str) -> dict[str, Any]:
    """Return the results of a group, which runs once."""
    return dict(on_gpus(1, results_of, group)[0])


def result_of(group: str, name: str) -> Any:
    """Return the result of a case, or fail the calling test with its traceback."""
    found = results_on_gpu(group)[name]
    if isinstance(found, str):
        pytest.fail(f"{name}:\n{found}", pytrace=False)
    return found


# The tests of this part run in the process of pytest.


def check_bits(found: dict[str, Any]) -> None:
    """Check that the case trained several sub-groups, and that no variant differs from stock."""
    assert found["stock class"] == STOCK
    assert len(found["numbers"]["step"]) >= 4, "a case has several sub-groups"
    for variant, differ in found["differences"].items():
        assert found["classes"][variant] == (STOCK if variant.endswith("to stock") else PLUGIN)
        assert differ == [], variant


BITS = [*(("placements", name) for name in GROUPS["placements"]), *(("engine", case.name) for case in COMPARED)]


@pytest.mark.parametrize(("group", "name"), BITS)
def test_every_kind_of_training_has_the_bits_of_stock(group: str, name: str) -> None:
    check_bits(result_of(group, name))


@pytest.mark.parametrize("name", GROUPS["long"])
def test_200_steps_of_long_runs_have_the_same_bits(name: str) -> None:
    found = result_of("long", name)
    assert len(found["numbers"]["step"]) == len(LONG.blocks[0]["placement"])
    assert len(set(found["numbers"]["loss"])) > 100, "the loss changes"
    assert not any(found["differences"].values()), found["differences"]


def test_the_states_in_host_memory_are_page_locked_until_destroy() -> None:
    found = result_of("engine", "page-locked")
    assert min(map(len, found)) > 10, "masters and moments of several sub-groups"
    assert [set(locked) for locked in found] == [{True}, {False}] * 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="the test needs two GPUs")
def test_two_processes_have_the_bits_of_stock_over_nccl() -> None:
    for found in on_gpus(2, same_as_stock, TWO_RANKS):
        check_bits(found)
