"""Check that units which move between steps, and between checkpoints, leave the bits of stock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.resident_states import ResidentStates
from deep_opt_states.runtime.state_memory import StateMemory
from deep_opt_states.zero.step.gradient_buffers import GradientBuffer
from deep_opt_states.zero.step.gradients import Gradients
from tests.ranks import on_ranks, once, ranks
from tests.zero.moves.accesses import accesses_before_each_step
from tests.zero.moves.cases import ACCESSED, CASES, MOVED_OFTEN
from tests.zero.moves.move_counts import KINDS, MoveCounts, assert_many_moves, total
from tests.zero.moves.random_plans import random_moves
from tests.zero.parity.case import Case
from tests.zero.parity.case_runs import results_in_turn
from tests.zero.parity.training import Block, Record, differences, run_resumed, run_variant

Result = dict[str, Any]


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
        "moved": moved,
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
        "moved": moved,
    }


def do_nothing(*_: object) -> None:
    pass


def load_nothing(self: ResidentStates) -> None:
    """Record that all states are loaded, but copy none."""
    for _, resident in self._units:
        resident.is_loaded = True


_set_buffers = Gradients.set_buffers


def keep_first_segments(self: Gradients, buffers: Sequence[GradientBuffer]) -> None:
    """Use ``buffers`` in updates, but the first ones in backward."""
    first = vars(self).get("_segments")
    _set_buffers(self, buffers)
    if first is not None:
        self._segments = first


NAIVE: dict[str, tuple[str, type, str, Callable[..., Any]]] = {
    "resident states are not written back": ("bf16, clipping, reload", Executor, "sync_states_to_host", do_nothing),
    "the states of new residents are not loaded": ("bf16, clipping, reload", ResidentStates, "load", load_nothing),
    "gradients are not moved": ("missing gradients", StateMemory, "_move_gradients", do_nothing),
    "gradients are added to the first buffers": (
        "fp32, two groups, serial",
        Gradients,
        "set_buffers",
        keep_first_segments,
    ),
}
"""The naive ways by name: the case that must fail, the class, the name of its method, and the method that replaces it.

``tests/software_gpu/faults/faults.py`` has those whose results depend on the time.
"""

WORLD_SIZES = (1, 2, 3)


@once
def trained(world_size: int) -> list[dict[str, Result]]:
    """Return the results of all cases of a world size by name, on each rank; they are trained once per worker."""
    # As in the parity tests, several ranks hash strings differently.
    return on_ranks(world_size, train_cases, timeout_s=400, fresh=world_size > 1)


def train_cases() -> dict[str, Result]:
    work: dict[str, Callable[[], Result]] = {}
    for cases, train in (
        (CASES, partial(with_moves, change_after=0.7)),
        (MOVED_OFTEN, partial(with_moves, change_after=1.0)),
        (ACCESSED, with_accesses),
    ):
        work |= {case.name: partial(train, case) for case in cases if case.world_size == dist.get_world_size()}
    return dict(results_in_turn(work.items()))


def grouped(world_size: int, *values: object) -> Any:
    """Return a test parameter such that one worker of pytest-xdist runs all tests of a world size."""
    marks = [pytest.mark.xdist_group(f"moves on {world_size}"), *([pytest.mark.thorough] if world_size > 1 else [])]
    return pytest.param(world_size, *values, id=", ".join(map(str, values)) or str(world_size), marks=marks)


@pytest.mark.promise("P1", "P2", "P4")
@pytest.mark.parametrize(
    ("world_size", "name"), [grouped(case.world_size, case.name) for case in (*CASES, *MOVED_OFTEN, *ACCESSED)]
)
def test_units_that_move_between_steps_leave_the_bits_of_stock(world_size: int, name: str) -> None:
    for rank, by_name in enumerate(trained(world_size)):
        assert name in by_name, "an earlier case failed"
        result = by_name[name]
        assert "error" not in result, result["error"]
        for variant, found in result["differences"].items():
            assert found == [], f"rank {rank}, {variant}"
        assert set(result["moved"].kinds) == KINDS, "every kind of move happens"


@pytest.mark.parametrize("world_size", [grouped(world_size) for world_size in WORLD_SIZES])
def test_a_thousand_units_move_at_each_number_of_ranks(world_size: int) -> None:
    for by_name in trained(world_size):
        assert_many_moves(total(result["moved"].to_json_dict() for result in by_name.values()))


@pytest.mark.parametrize("name", NAIVE)
@ranks(1)
def test_every_naive_way_to_move_changes_bits(name: str) -> None:
    case_name, owner, method, replacement = NAIVE[name]
    case = next(case for case in CASES if case.name == case_name)
    stock = run_variant(case, None)
    with random_moves(1, MoveCounts(), change_after=1.0), mock.patch.object(owner, method, replacement):
        assert differences(stock, run_variant(case, case.blocks[0]))
