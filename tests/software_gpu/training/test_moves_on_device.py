"""Check that units which move between steps on the device leave the bits of stock on the CPU accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import on_ranks, once
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import ADVERSARIES
from tests.software_gpu.training.test_parity_on_device import CHOICE, shortened
from tests.zero.moves.accesses import accesses_before_each_step
from tests.zero.moves.cases import ACCESSED, CASES, MOVED_OFTEN
from tests.zero.moves.move_counts import KINDS, MoveCounts, assert_many_moves, total
from tests.zero.moves.random_plans import random_moves
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.parity.case_runs import Result, results_in_turn
from tests.zero.parity.training import Block, Record, differences, run_resumed, run_variant

BOTH = ("plain", "lazy")

CHOSEN = {
    "bf16, clipping, reload": BOTH,
    "from and to checkpoints of stock": ("lazy",),
    "accesses after moves": ("lazy",),
    "2 ranks, accumulation 3, clipping": BOTH,
}
"""The cases of ``make test`` with their adversaries. Each of them is shortened."""


def selected(selection: str, world_size: int) -> Iterator[tuple[Case, tuple[str, ...]]]:
    """Yield the cases of the selection for this number of ranks, each with its adversaries."""
    for case in (*CASES, *MOVED_OFTEN, *ACCESSED):
        if case.world_size != world_size:
            continue
        # With a plan that updates everything on the CPU, no kernel for the GPU is made.
        (block,) = case.blocks
        case = replace(case, blocks=({**block, **STRIDE_2},))
        if selection != CHOICE:
            yield case, (selection,)
        elif case.name in CHOSEN:
            yield shortened(case), CHOSEN[case.name]


def record_of(case: Case, saved_by: Block, block: Block) -> Record:
    """Train the case, and return the record; if the user accesses states after moves, with everything that was read.

    In cases that resume, ``saved_by`` has saved the checkpoint.
    """
    if case.resume:
        return run_resumed(case, saved_by, block)
    if case.name not in {accessed.name for accessed in ACCESSED}:
        return run_variant(case, block)
    with accesses_before_each_step(case) as seen:
        record = run_variant(case, block)
    record.tensors |= {f"access {number}": tensor for number, tensor in enumerate(seen)}
    return record


def arms_of(case: Case) -> dict[str, tuple[Block, Block]]:
    """Return the blocks that save a checkpoint and train after it, by name; without a checkpoint, one arm."""
    (block,) = case.blocks
    if not case.resume:
        return {"": (block, block)}
    return {
        ", checkpoint of stock": (None, block),
        ", checkpoint for stock": (block, None),
        ", checkpoint of moving units": (block, block),
    }


def compare(case: Case, adversaries: tuple[str, ...]) -> dict[str, Any]:
    """Train the case with stock on the CPU accelerator, then with each adversary on the device while units move."""
    expected = record_of(case, None, None)
    found: dict[str, Any] = {}
    for adversary in adversaries:
        for name, (saved_by, resumed_by) in arms_of(case).items():
            moved = MoveCounts()
            with (
                plugged(ADVERSARIES[adversary]),
                random_moves(len(case.name), moved, change_after=1.0),
            ):
                record = record_of(case, saved_by, resumed_by)
            found[f"{adversary}{name}"] = {
                "class": record.optimizer_class,
                "differences": differences(expected, record),
                "moved": moved.to_json_dict(),
            }
    return {"arms": found, "losses": expected.numbers["loss"]}


STOCK, OURS = "DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"
WORLD_SIZES = {CHOICE: (1, 2), **dict.fromkeys((*BOTH, "jitter"), (1, 2, 3))}
"""The numbers of ranks by selection of cases."""


@once
def trained(selection: str, world_size: int) -> list[dict[str, Result]]:
    """Return the results of each rank by name."""
    return on_ranks(world_size, train_cases, selection, group=software_process_group, timeout_s=900)


def train_cases(selection: str) -> dict[str, Result]:
    cases = selected(selection, dist.get_world_size())
    return dict(results_in_turn((case.name, partial(compare, case, adversaries)) for case, adversaries in cases))


def moves_of(selection: str, world_size: int) -> list[MoveCounts]:
    """Return the moves in all cases of a selection and a number of ranks, of each rank."""
    return [
        total(found["moved"] for result in by_name.values() for found in result["arms"].values())
        for by_name in trained(selection, world_size)
    ]


def marked(selection: str, *values: Any, name: str) -> Any:
    """Return a test parameter; one worker of pytest-xdist trains all cases of a selection."""
    marks = [pytest.mark.xdist_group(f"moves on device {selection}")]
    if selection != CHOICE:
        marks.append(pytest.mark.thorough)
    return pytest.param(selection, *values, id=name, marks=marks)


@pytest.mark.promise("P1", "P2", "P4")
@pytest.mark.parametrize(
    ("selection", "case", "adversaries"),
    [
        marked(selection, case, adversaries, name=f"{selection}: {case.name}")
        for selection, world_sizes in WORLD_SIZES.items()
        for world_size in world_sizes
        for case, adversaries in selected(selection, world_size)
    ],
)
def test_units_that_move_on_the_device_leave_the_bits_of_stock(
    selection: str, case: Any, adversaries: tuple[str, ...]
) -> None:
    for rank, by_name in enumerate(trained(selection, case.world_size)):
        assert case.name in by_name, "an earlier case failed"
        result = by_name[case.name]
        assert "error" not in result, result["error"]
        assert list(result["arms"]) == [f"{adversary}{name}" for adversary in adversaries for name in arms_of(case)]
        for arm, found in result["arms"].items():
            assert found["class"] == (STOCK if arm.endswith("for stock") else OURS)
            assert found["differences"] == [], f"rank {rank}, {arm}"
            assert found["moved"]["kinds"]
            assert found["moved"]["kinds"].keys() <= KINDS
        # Training that changed nothing would have equal bits, too.
        assert len(set(result["losses"])) > 2


@pytest.mark.parametrize(
    ("selection", "world_size"),
    [
        marked(selection, world_size, name=f"{selection}, {world_size} ranks")
        for selection in WORLD_SIZES
        if selection != CHOICE
        for world_size in WORLD_SIZES[selection]
    ],
)
def test_a_thousand_units_move_on_the_device_at_each_number_of_ranks(selection: str, world_size: int) -> None:
    for counts in moves_of(selection, world_size):
        assert_many_moves(counts)


@pytest.mark.parametrize("selection", [marked(CHOICE, name=CHOICE)])
def test_units_move_often_on_the_device(selection: str) -> None:
    for world_size in WORLD_SIZES[selection]:
        for counts in moves_of(selection, world_size):
            assert_many_moves(counts, least={1: 300, 2: 100}[world_size], recut_plans=5)


@pytest.mark.parametrize("selection", [marked(selection, name=selection) for selection in BOTH])
def test_moving_states_are_evicted_with_offloaded_parameters(selection: str) -> None:
    (by_name,) = trained(selection, 1)
    counts = total(
        found["moved"]
        for case, _ in selected(selection, 1)
        if case.offload_param
        for found in by_name[case.name]["arms"].values()
    )
    assert min(counts.promotions, counts.demotions) >= 100, counts
    assert min(counts.recut_plans, counts.evictions, counts.restorations) >= 5, counts
