"""Test the real engine on CUDA with ``overlap_comm``: every kind of training is bit-identical to stock.

A gradient crosses PCIe at most once, all copies use page-locked memory, and no other process changes a bit or shares
the states' memory. ``parts.py`` selects the tests of a part by the words "placements", "long" and "processes".
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from perf_model.prediction.memory import MemoryKind
from perf_model.schedule.workload import STATES
from tests.forked_child import is_mapped
from tests.gpu.parts import seconds_left
from tests.ranks import on_ranks, once
from tests.zero.parity import training
from tests.zero.parity.case import CPU, EVERY_PLACEMENT, RESIDENT, SERIAL, STREAMED, STRIDE_2, Case, by_sub_group
from tests.zero.parity.cases import CASES
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import (
    closing_engine,
    differences,
    result,
    run_variant,
    same_as_stock,
    shared_folder,
    train,
)
from tests.zero.process_group import process_group
from tests.zero.test_gradients import TRAFFIC_CASES, check_traffic, traffic

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
# Slabs of about 30 MB: pages that a child inherited would be copied when the next update writes them.
FORKED = replace(LONG, name="fork", blocks=LONG.blocks[1:], steps=12, clip=0.0, widths=(512, 1024, 1024, 512))
WIDE_UNITS = {"unit_size": 3_000_000}
WIDE = Case(
    name="peak memory",
    blocks=(CPU, {**STREAMED, **WIDE_UNITS, "num_slots": 2}, {**STRIDE_2, **WIDE_UNITS}),
    widths=(2048,) * 9,
    sub_group_size=9_000_000,
    zero={**OVERLAP, "reduce_bucket_size": 5 * 10**6, "stage3_prefetch_bucket_size": 5 * 10**6},
)
ROUNDING_BYTES = 2 * 2**20
"""PyTorch's allocator returns blocks that are up to this much larger than requested."""

# The functions of this part run on a rank, in a process that initializes CUDA.

stock_of_placements = once(partial(run_variant, PLACEMENTS, None))


def placement(block: dict[str, Any]) -> dict[str, Any]:
    return result(stock_of_placements(), {str(block): run_variant(PLACEMENTS, block)})


@once
def long_run(number: int | None) -> Any:
    return run_variant(LONG, None if number is None else LONG.blocks[number])


def long_against_stock(number: int) -> dict[str, Any]:
    return result(long_run(None), {str(LONG.blocks[number]): long_run(number)})


def long_again() -> dict[str, Any]:
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


def peak_memory() -> dict[str, tuple[int, int]]:
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
        found["stock" if block is None else str(block)] = (peak_bytes, reserved_bytes)
    return found


def train_with_fork() -> dict[str, Any]:
    stock = run_variant(FORKED, None)
    found = {}
    for block in FORKED.blocks:
        with shared_folder() as folder, closing_engine(FORKED, block) as engine, forking(engine) as child:
            record = train(engine, FORKED, folder)
            found[str(block)] = {**child, "differences": differences(stock, record)}
    return found


@contextmanager
def forking(engine: Any) -> Iterator[dict[str, Any]]:
    """Fork a child in the middle of training, which writes to memory of its own until training is over."""
    child: dict[str, Any] = {}

    def forking_batch(case: Case, rank: int, micro_batch: int, dtype: torch.dtype) -> Any:
        if micro_batch == 3:
            masters = [state.parts[0].states.master for state in engine.optimizer._running.memory.units]
            child["pid"] = pid = os.fork()
            if pid == 0:
                while True:
                    bytearray(2**20)
                    time.sleep(0.01)
            middles = {master.data_ptr() + master.nbytes // 2: master.nbytes for master in masters if master.is_cpu}
            child["states_bytes"] = sum(middles.values())
            child["inherited_bytes"] = sum(size for address, size in middles.items() if is_mapped(address, pid))
        return batch(case, rank, micro_batch, dtype)

    try:
        with mock.patch.object(training, "batch", forking_batch):
            yield child
    finally:
        os.kill(child["pid"], signal.SIGKILL)
        os.waitpid(child["pid"], 0)


def memory_of_gpu_0() -> tuple[str, int]:
    def used_bytes() -> int:
        command = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return int(subprocess.check_output(command, timeout=20).split()[0]) * 2**20

    before_bytes = used_bytes()
    with shared_folder() as folder, closing_engine(FORKED, STRIDE_2) as engine:
        train(engine, FORKED, folder)
        return str(engine.device), used_bytes() - before_bytes


GROUPS: dict[str, dict[str, Callable[[], Any]]] = {
    "placements": {str(block): partial(placement, block) for block in PLACEMENTS.blocks},
    "long": {
        **{f"200 steps, {block}": partial(long_against_stock, number) for number, block in enumerate(LONG.blocks)},
        **{f"200 steps, repetition {repetition}": long_again for repetition in (1, 2)},
    },
    "engine": {
        **{case.name: partial(same_as_stock, case) for case in COMPARED},
        "gradient traffic": lambda: [traffic(*case) for case in TRAFFIC_CASES],
        "page-locked": page_locked,
        WIDE.name: peak_memory,
    },
    "processes": {FORKED.name: train_with_fork},
}
"""The cases that share a process, since starting one takes seconds."""


def results_of(group: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, work in GROUPS[group].items():
        try:
            found[name] = work()
        except Exception:  # noqa: BLE001 (the case's test fails with it)
            found[name] = traceback.format_exc()
    return found


@contextmanager
def on_own_gpu() -> Iterator[None]:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with process_group():
        yield


def on_gpus(world_size: int, function: Callable[..., Any], *arguments: Any, **changes: str) -> list[Any]:
    # A forked process could not use CUDA if the process that it is forked from has initialized it.
    options: dict[str, Any] = {"timeout_s": seconds_left(), "fresh": True, "group": on_own_gpu, **CUDA, **changes}
    return on_ranks(world_size, function, *arguments, **options)


@once
def results_on_gpu(group: str) -> dict[str, Any]:
    return dict(on_gpus(1, results_of, group)[0])


def result_of(group: str, name: str) -> Any:
    found = results_on_gpu(group)[name]
    if isinstance(found, str):
        pytest.fail(f"{name}:\n{found}", pytrace=False)
    return found


# The tests of this part run in the process of pytest.


def check_bits(found: dict[str, Any]) -> None:
    assert found["stock class"] == STOCK
    assert len(found["numbers"]["step"]) >= 4, "a case has several sub-groups"
    for variant, differ in found["differences"].items():
        assert found["classes"][variant] == (STOCK if variant.endswith("to stock") else PLUGIN)
        assert differ == [], variant


BITS = [*(("placements", name) for name in GROUPS["placements"]), *(("engine", case.name) for case in COMPARED)]


@pytest.mark.parametrize(("group", "name"), BITS)
def test_every_kind_of_training_is_bit_identical_to_stock(group: str, name: str) -> None:
    check_bits(result_of(group, name))


@pytest.mark.parametrize("name", GROUPS["long"])
def test_200_steps_of_long_runs_have_the_same_bits(name: str) -> None:
    found = result_of("long", name)
    assert len(found["numbers"]["step"]) == len(LONG.blocks[0]["placement"])
    assert len(set(found["numbers"]["loss"])) > 100, "the loss changes"
    assert not any(found["differences"].values()), found["differences"]


def test_each_gradient_moves_the_expected_bytes_in_each_direction() -> None:
    for (block, accumulation), moved in zip(TRAFFIC_CASES, result_of("engine", "gradient traffic"), strict=True):
        # A GPU has enough memory for the accumulators of so few parameters.
        check_traffic(block, accumulation, moved, sums_stay=True)


def test_the_states_in_host_memory_are_page_locked_until_destroy() -> None:
    found = result_of("engine", "page-locked")
    assert min(map(len, found)) > 10, "masters and moments of several sub-groups"
    assert [set(locked) for locked in found] == [{True}, {False}] * 2


def test_the_peak_of_gpu_memory_is_at_most_stocks_plus_the_reserved_memory() -> None:
    """Check that gradients on their way to the host use only memory that was reserved at the start."""
    found = result_of("engine", WIDE.name)
    stock_bytes, _ = found.pop("stock")
    for block, (peak_bytes, reserved_bytes) in found.items():
        assert peak_bytes <= stock_bytes + reserved_bytes + ROUNDING_BYTES, block


def test_of_other_processes_a_forked_child_changes_no_bits_and_inherits_no_states() -> None:
    for block, child in result_of("processes", FORKED.name).items():
        assert child["differences"] == [], block
        assert child["states_bytes"] > 2 * 2**20, block
        assert child["inherited_bytes"] == 0, f"{block}: the child has pages of the states"


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="the test needs two GPUs")


@two_gpus
def test_two_processes_are_bit_identical_to_stock_over_nccl() -> None:
    for found in on_gpus(2, same_as_stock, TWO_RANKS):
        check_bits(found)


@two_gpus
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no nvidia-smi in PATH")
def test_of_two_processes_the_one_on_the_second_gpu_uses_no_memory_of_the_first() -> None:
    ((device, added_bytes),) = on_gpus(1, memory_of_gpu_0, LOCAL_RANK="1")
    assert device == "cuda:1"
    # Less than the memory of a CUDA context, and more than the rounding of nvidia-smi.
    assert added_bytes < 200 * 2**20
