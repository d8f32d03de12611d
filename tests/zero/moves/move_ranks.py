"""Train cases with stock, and with the plugin while random units move between steps; started by ``test_moves.py``.

Argument: the path of the results, to which the rank is appended.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch.distributed as dist

from tests.fork_server import import_all
from tests.zero.moves.accesses import accesses_before_each_step
from tests.zero.moves.cases import ACCESSED, CASES, MOVED_OFTEN
from tests.zero.moves.move_counts import MoveCounts
from tests.zero.moves.naive_moves import NAIVE
from tests.zero.moves.random_plans import random_moves
from tests.zero.parity.case import Case
from tests.zero.parity.case_runs import Result, write_results
from tests.zero.parity.training import Block, Record, differences, run_resumed, run_variant
from tests.zero.process_group import process_group


def with_moves(case: Case, change_after: float) -> Result:
    """Return the differences from stock, and the counts of moves."""
    moved = MoveCounts()
    (block,) = case.blocks
    if case.resume:
        stock = run_resumed(case, None, None)
        with random_moves(2 + len(case.name), moved, change_after):
            variants = {
                "checkpoint of stock": run_resumed(case, None, block),
                "checkpoint for stock": run_resumed(case, block, None),
                "checkpoint of moving units": run_resumed(case, block, block),
            }
    else:
        stock = run_variant(case, None)
        with random_moves(2 + len(case.name), moved, change_after):
            variants = {"moving": run_variant(case, block)}
    return {
        "differences": {name: differences(stock, variant) for name, variant in variants.items()},
        "deferred": max(variant.deferred for variant in variants.values()),
        "moved": moved.to_json_dict(),
    }


def with_accesses(case: Case) -> Result:
    """Return the differences from stock, also in what is read right after a move."""

    def run(block: Block) -> Record:
        with accesses_before_each_step(case) as seen:
            record = run_variant(case, block)
        record.tensors |= {f"access {number}": tensor for number, tensor in enumerate(seen)}
        assert len(seen) > 5 * case.steps
        return record

    moved = MoveCounts()
    stock = run(None)
    with random_moves(2 + len(case.name), moved, change_after=1.0):
        ours = run(case.blocks[0])
    return {
        "differences": {"accessed": differences(stock, ours)},
        "deferred": ours.deferred,
        "moved": moved.to_json_dict(),
    }


def naive(name: str) -> Result:
    """Return what shows the naive way to move: the differences, or the exception."""
    case_name, owner, method, replacement = NAIVE[name]
    case = next(case for case in CASES if case.name == case_name)
    stock = run_variant(case, None)
    with random_moves(1, MoveCounts(), change_after=1.0), mock.patch.object(owner, method, replacement):
        return {"shown": differences(stock, run_variant(case, case.blocks[0]))}


def main(path: str) -> None:
    work: dict[str, Callable[[], Result]] = {}
    for cases, train in (
        (CASES, partial(with_moves, change_after=0.7)),
        (MOVED_OFTEN, partial(with_moves, change_after=1.0)),
        (ACCESSED, with_accesses),
    ):
        for case in (case for case in cases if case.world_size == dist.get_world_size()):
            work[case.name] = lambda case=case, train=train: train(case)
    if dist.get_world_size() == 1:
        for name in NAIVE:
            work[name] = lambda name=name: naive(name)
    write_results(work, path)


if __name__ == "__main__":
    # Before the process group, which keeps the garbage collections of DeepSpeed from all modules that are imported.
    import_all()
    with process_group():
        main(sys.argv[1])
