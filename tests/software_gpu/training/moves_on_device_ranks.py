"""Train on the device while random units move between steps, and compare with stock on the CPU accelerator.

The argument is the name of a selection: ``CHOICE``, or an adversary. Every rank prints one answer per case, with the
differences and the number of moves of each adversary.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist

from tests.launch import answer
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import ADVERSARIES
from tests.software_gpu.training.parity_on_device_ranks import CHOICE, shortened
from tests.zero.moves.accesses import accesses_before_each_step
from tests.zero.moves.cases import ACCESSED, CASES, MOVED_OFTEN
from tests.zero.moves.move_counts import MoveCounts
from tests.zero.moves.random_plans import random_moves
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.parity.case_runs import results_in_turn
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
    return {"name": case.name, "arms": found, "losses": expected.numbers["loss"]}


def main(selection: str) -> None:
    cases = selected(selection, dist.get_world_size())
    for name, result in results_in_turn(
        (case.name, partial(compare, case, adversaries)) for case, adversaries in cases
    ):
        answer({"name": name, **result})


if __name__ == "__main__":
    with software_process_group():
        main(sys.argv[1])
