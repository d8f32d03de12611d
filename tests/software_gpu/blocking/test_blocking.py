"""Check where a step makes the host wait for the device: the numbers are those of the table in docs/dev/design.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks
from tests.software_gpu.blocking.blocking_ranks import STEADY_FROM, STEPS
from tests.tiers import thorough
from tests.zero.training_once import ProgramRanks, TrainingOnce, on_one_worker

DESIGN = Path(__file__).parents[3] / "docs" / "dev" / "design.md"

STEADY_STEPS = STEPS - STEADY_FROM

ROWS = {
    # Where the host waits, by the caller: the phase and the row of the table.
    "norms.py:per_sub_group": ("step", "norms of the gradients"),
    "norms.py:overflow": ("step", "norms of the gradients"),
    "stage3.py:complete_grad_norm_calculation_for_cpu_offload": ("step", "norms of the gradients"),
    "utils.py:mask_nan_or_inf_with_val_inplace": ("step", "norms of the gradients"),
    "stage3.py:has_overflow": ("step", "overflow"),
    "lanes.py:wait_until_drained": ("step", "end of the update"),
    "lanes.py:wait_for_caller": ("step", "end of backward, before the update begins"),
    "stage3.py:_reassign_or_swap_out_partitioned_parameters": ("step", "copies of the updated parameters"),
    "agreement.py:share": ("step", "agreement of the ranks that no update failed"),
    "partition_parameters.py:wait": ("step", "gather of the persistent parameters"),
    "partition_parameters.py:_allgather_params_coalesced": ("step", "gather of the persistent parameters"),
    "stage3.py:independent_gradient_partition_epilogue": ("backward", "reduction of the gradients"),
}
REPORT = "blocking_ranks.py:recorded_synchronize"
"""The report of the last update, whose waits are recorded separately."""

WHOLE_DEVICE = "synchronize"
"""The reason of a wait for all streams."""

GATHERS = ("partition_parameters.py", "partitioned_param_coordinator.py")
"""DeepSpeed's gathers in forward and backward: how often the host waits depends on how far they are ahead."""

COPY_OF_OFFLOADED = "copy H2D, blocking"
"""The wait for a copy that DeepSpeed issues before it gathers an offloaded parameter, with several ranks only."""

CONDITIONS = {
    "": lambda variant, world_size: True,
    "fp16": lambda variant, world_size: variant["dtype"] == "fp16",
    "several ranks": lambda variant, world_size: world_size > 1,
    "no `offload_param`": lambda variant, world_size: not variant["offloads"],
}

COLUMNS = {"stock": 0, "ends in step": 1, "deferred": 2}


@cache
def table() -> dict[tuple[str, str], tuple[str, tuple[str, ...]]]:
    """Return the condition and the numbers of each row, by phase and row."""
    section = DESIGN.read_text().partition("## Waits of the host\n")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {(phase.strip("`()"), row): (condition, tuple(numbers)) for phase, row, condition, *numbers in lines[2:]}


def number(text: str, sub_groups: int) -> int:
    """Return the number in a cell: ``3``, or ``4n`` with n sub-groups."""
    factor, of_sub_groups = re.fullmatch(r"(\d*)(n?)", text).groups()  # type: ignore[union-attr]
    return int(factor or 1) * (sub_groups if of_sub_groups else 1)


def expected(variant: dict[str, Any], world_size: int) -> dict[tuple[str, str], int]:
    """Return how often the host waits per step, by phase and row; rows without waits are left out."""
    found = {}
    for key, (condition, numbers) in table().items():
        if CONDITIONS[condition](variant, world_size):
            found[key] = number(numbers[COLUMNS[variant["update"]]], variant["sub-groups"])
    return {key: count for key, count in found.items() if count}


def by_row(variant: dict[str, Any], world_size: int) -> Iterator[Counter[tuple[str, str]]]:
    """Return the waits of each step by phase and row, and fail the test for a wait that has no row."""
    for step in range(STEADY_STEPS):
        counted: Counter[tuple[str, str]] = Counter()
        for phase, waits in variant["waits"].items():
            for reason, thread, caller in waits[step]:
                if caller == REPORT:
                    continue
                assert thread != "worker", caller
                if caller.startswith(GATHERS) and (phase != "step" or reason == COPY_OF_OFFLOADED):
                    assert reason != COPY_OF_OFFLOADED or (variant["offloads"] and world_size > 1)
                else:
                    counted[ROWS[caller]] += 1
                    assert ROWS[caller][0] == phase, f"{caller} waits in {phase}, step {step}"
        yield counted


def check_waits(variants: list[dict[str, Any]], world_size: int) -> None:
    for found in variants:
        assert found["sub-groups"] >= 2, "a wait per sub-group would be noticed"
        for step, waits in enumerate(by_row(found, world_size)):
            assert waits == expected(found, world_size), f"{label_of(found)}, step {step}"
        assert found["unreached"] == 0, f"{label_of(found)}: a report has waited for the device"
        # With several ranks, stock waits for the whole device when it has gathered the persistent parameters. An update
        # whose prefetches are in flight must not be waited for.
        reasons = {reason for steps in found["waits"].values() for waits in steps for reason, _, _ in waits}
        assert (WHOLE_DEVICE in reasons) == (found["update"] == "stock" and world_size > 1), label_of(found)


def check_copies(variants: list[dict[str, Any]], world_size: int) -> None:
    of_stock = {(found["dtype"], found["offloads"]): found for found in variants if found["update"] == "stock"}
    for found in variants:
        if found["update"] == "stock":
            continue
        label = label_of(found)
        blocking = Counter(
            (reason, caller)
            for steps in found["waits"].values()
            for waits in steps
            for reason, _, caller in waits
            if reason.startswith("copy") and not caller.startswith(GATHERS)
        )
        # Only the norms and the agreements of the ranks are read, which the step cannot be decided without. The ranks
        # agree as often as the table has it: twice if the step waits for its update.
        norms = "norms.py:overflow" if found["dtype"] == "fp16" else "norms.py:per_sub_group"
        agreements = STEADY_STEPS * expected(found, world_size).get(ROWS["agreement.py:share"], 0)
        assert (agreements > 0) == (world_size > 1), label
        read = {norms: STEADY_STEPS, "agreement.py:share": agreements}
        assert blocking == Counter({("copy D2H, blocking", caller): count for caller, count in read.items()}), label
        pageable = {name: count for name, count in found["copies"].items() if name.endswith(", pageable")}
        # The script's loss and batches, inputs and targets, are not page-locked, and neither are the agreement's flags.
        down = STEADY_STEPS + agreements
        assert pageable == {"copy D2H, pageable": down, "copy H2D, pageable": 2 * STEADY_STEPS}, label
        if found["placement"] != "resident":
            assert {"copy H2D", "copy D2H"} < found["copies"].keys(), label
        # The check can fail: stock copies norms and parameters from pageable memory.
        stock = of_stock[found["dtype"], found["offloads"]]
        assert stock["copies"]["copy H2D, pageable"] > 10 * STEADY_STEPS


def label_of(variant: dict[str, Any]) -> str:
    return " ".join(str(variant[key]) for key in ("dtype", "offloads", "placement", "update"))


PROGRAM = "tests.software_gpu.blocking.blocking_ranks"
RANKS = ProgramRanks(PROGRAM, timeout_s=300, arguments=lambda _: ["few"])
WORLD_SIZES = [pytest.param(1, marks=on_one_worker(PROGRAM, 1)), thorough(2, on_one_worker(PROGRAM, 2))]


def test_the_table_of_waits_in_the_documentation_has_every_row() -> None:
    assert table().keys() == set(ROWS.values())
    assert {condition for condition, _ in table().values()} <= CONDITIONS.keys()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_host_waits_for_the_device_as_often_as_the_documentation_says(
    world_size: int, trained: TrainingOnce
) -> None:
    variants = trained.answers(world_size)[0]
    assert len(variants) == {1: 19, 2: 12}[world_size]
    check_waits(variants, world_size)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_no_copy_of_the_hot_path_blocks_the_host_or_uses_pageable_memory(
    world_size: int, trained: TrainingOnce
) -> None:
    check_copies(trained.answers(world_size)[0], world_size)


@pytest.mark.parametrize("world_size", [thorough(1), thorough(2)])
def test_every_dtype_placement_and_overlap_waits_as_documented_and_copies_from_page_locked_memory(
    world_size: int,
) -> None:
    first, *_ = ranks = run_ranks(world_size, ["-m", PROGRAM, "all"], timeout_s=600)
    for rank, finished in enumerate(ranks):
        assert finished.returncode == 0, f"rank {rank}:\n{finished.output[-5000:]}"
    variants = first.answers()
    assert len(variants) == 3 * 2 * (1 + 4 * 2)
    check_waits(variants, world_size)
    check_copies(variants, world_size)
