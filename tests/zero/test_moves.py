"""Check that units which move between steps, and between checkpoints, leave the bits of stock.

In some cases the user reads states and sets gradients between a backward, which begins with the moves, and its step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed import utils
from deepspeed.runtime.engine import DeepSpeedEngine

from deep_opt_states.device.kernels.adam import ElementRange
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.resident_states import ResidentStates
from deep_opt_states.runtime.state_memory import StateMemory
from deep_opt_states.zero.step.exposure import Exposure
from deep_opt_states.zero.step.gradient_buffers import GradientBuffer
from deep_opt_states.zero.step.gradients import Gradients
from deep_opt_states.zero.step.measured_windows import MeasuredWindows
from deep_opt_states.zero.step.running_plan import RunningPlan
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from tests.ranks import on_ranks, ranks
from tests.tiers import thorough
from tests.zero.parity.case import CPU, SERIAL, STRIDE_2, WITHOUT_BACKWARD_OVERLAP, Case, ParamGroup
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import (
    DTYPES,
    Block,
    Record,
    Result,
    differences,
    real_numel,
    results_in_turn,
    run_resumed,
    run_variant,
)
from tests.zero.random_plans import KINDS, MoveCounts, random_moves

TWO_GROUPS = (ParamGroup(), ParamGroup(lr=1e-3, weight_decay=0.2))

CASES = (
    Case(name="bf16, clipping, reload", blocks=(CPU,), steps=24, clip=0.5, reload=(9, 14)),
    Case(
        name="fp16, overflows, accumulation 2", blocks=(CPU,), dtype="fp16", steps=16, accumulation=2, poisoned={3: 1e6}
    ),
    Case(name="fp32, two groups, serial", blocks=({**CPU, **SERIAL},), dtype="fp32", steps=30, groups=TWO_GROUPS),
    Case(name="missing gradients", blocks=(CPU,), steps=16, sometimes=True, unused=True, frozen=True),
    Case(name="from and to checkpoints of stock", blocks=(CPU,), steps=8, clip=0.5, resume=True),
    Case(name="shared host memory", blocks=(CPU,), steps=16, shares_host_memory=True),
    Case(
        name="2 ranks, accumulation 3, clipping",
        blocks=({**CPU, **WITHOUT_BACKWARD_OVERLAP},),
        world_size=2,
        steps=16,
        accumulation=3,
        clip=0.5,
    ),
    Case(name="3 ranks, from and to checkpoints of stock", blocks=(CPU,), world_size=3, clip=0.5, resume=True),
)
"""Cases in which random units move after random steps."""

MOVED_OFTEN = (
    Case(
        name="offloaded parameters, accumulation 2, moves after each of 20 steps",
        blocks=(CPU,),
        steps=20,
        accumulation=2,
        clip=0.5,
        offload_param=True,
        reload=(9, 12),
    ),
    *(
        Case(
            name=f"{world_size} ranks, moves after each of {steps} steps",
            blocks=(CPU,),
            world_size=world_size,
            steps=steps,
            clip=0.5,
            reload=(steps // 2, steps // 2 + 5),
            # Wider layers are cut in more places.
            widths=(19, 90, 120, 90, 23),
            sub_group_size=6000,
        )
        for world_size, steps in ((2, 50), (3, 70))
    ),
)
"""Cases in which random units move after every step. They are short for their number of moves."""

ACCESSED = (
    Case(name="accesses after moves", blocks=(STRIDE_2,), steps=20, clip=0.5),
    Case(name="2 ranks, accesses after moves", blocks=({**CPU, **SERIAL},), world_size=2, steps=16, accumulation=2),
    Case(name="3 ranks, accesses after moves, fp16", blocks=(STRIDE_2,), world_size=3, steps=20, dtype="fp16"),
)
"""Cases in which units move after every step, and the user reads states and sets gradients right after that."""


@contextmanager
def accesses_before_each_step(case: Case) -> Iterator[list[torch.Tensor]]:
    """Read states or set gradients before each step of an engine, in turn. The context yields what was read."""
    step = DeepSpeedEngine.step
    seen: list[torch.Tensor] = []

    def access_and_step(self: Any, *args: Any) -> None:
        if self.is_gradient_accumulation_boundary():
            seen.extend(tensor.detach().cpu().clone() for tensor in access(self, case))
        step(self, *args)

    with mock.patch.object(DeepSpeedEngine, "step", access_and_step):
        yield seen


def access(engine: Any, case: Case) -> list[torch.Tensor]:
    params = [param for param in engine.module.parameters() if param.requires_grad]
    match engine.global_steps % 4:
        case 1:
            keys = ("exp_avg", "exp_avg_sq")
            moments = [utils.safe_get_full_optimizer_state(param, key) for param in params for key in keys]
            return [*map(utils.safe_get_full_fp32_param, params), *moments]
        case 2:
            grads = [utils.safe_get_full_grad(param) for param in params]
            for param in params[::2]:
                utils.safe_set_local_grad(param, changed(param))
            return grads
        case 3:
            with deepspeed.zero.GatheredParameters(params):
                gathered = [param.data.clone() for param in params]
            return [*gathered, evaluated_loss(engine, case)]
        case _:
            return []


def changed(param: Any) -> torch.Tensor:
    """Return another gradient of this rank's partition, with zeros in the padding, which counts in stock's norm."""
    value: torch.Tensor = 0.5 * utils.safe_get_local_grad(param) + 0.01
    value[real_numel(param) :] = 0.0
    return value


def evaluated_loss(engine: Any, case: Case) -> torch.Tensor:
    x, target = (
        tensor.to(engine.device, non_blocking=True) for tensor in batch(case, dist.get_rank(), 99, DTYPES[case.dtype])
    )
    engine.eval()
    with torch.no_grad():
        loss: torch.Tensor = engine(x, target, 1.0, 1.0)
    engine.train()
    return loss


def record_of(case: Case, saved_by: Block, block: Block) -> Record:
    """Train the case, and return the record; with all that was read, if the user accesses states after moves."""
    if case.resume:
        return run_resumed(case, saved_by, block)
    with accesses_before_each_step(case) if case in ACCESSED else nullcontext([]) as seen:
        record = run_variant(case, block)
    assert len(seen) > 5 * case.steps or case not in ACCESSED
    record.tensors |= {f"access {number}": tensor for number, tensor in enumerate(seen)}
    return record


def with_moves(case: Case) -> Result:
    """Return the differences from stock, and the counts of moves. A case that resumes also transfers checkpoints."""
    (block,) = case.blocks
    stock, moved = record_of(case, None, None), MoveCounts()
    arms = ((None, block), (block, None), (block, block)) if case.resume else ((block, block),)
    with random_moves(2 + len(case.name), moved, 0.7 if case in CASES else 1.0):
        found = [differences(stock, record_of(case, *arm)) for arm in arms]
    return {"differences": found, "moved": moved}


def trained(world_size: int) -> list[dict[str, Result]]:
    """Return the results of all cases of a world size by name, on each rank."""
    # As in the parity tests, several ranks hash strings differently.
    return on_ranks(world_size, train_cases, timeout_s=400, fresh=world_size > 1)


def train_cases() -> dict[str, Result]:
    cases = [case for case in (*CASES, *MOVED_OFTEN, *ACCESSED) if case.world_size == dist.get_world_size()]
    return dict(results_in_turn((case.name, partial(with_moves, case)) for case in cases))


@pytest.mark.P1
@pytest.mark.P2
@pytest.mark.P4
@pytest.mark.xdist_group("moves")
@pytest.mark.parametrize("world_size", [1, thorough(2), thorough(3)])
def test_a_thousand_units_that_move_between_steps_leave_the_bits_of_stock(world_size: int) -> None:
    for rank, by_name in enumerate(trained(world_size)):
        for name, result in by_name.items():
            assert "error" not in result, result["error"]
            assert not any(result["differences"]), f"rank {rank}, {name}: {result['differences']}"
            assert set(result["moved"].kinds) == KINDS, "every kind of move happens"
        moves = [result["moved"] for result in by_name.values()]
        assert sum(moved.kinds.total() for moved in moves) >= 1000
        for count in ("recut_plans", "evictions", "restorations"):
            assert sum(getattr(moved, count) for moved in moves) >= 5, count


def load_nothing(self: ResidentStates) -> None:
    """Record that all states are loaded, but copy none."""
    for _, resident in self._units:
        resident.is_loaded = True


def keep_first_segments(self: Gradients, buffers: Sequence[GradientBuffer]) -> None:
    """Use ``buffers`` in updates, but the first ones in backward."""
    first = vars(self).get("_segments")
    set_buffers(self, buffers)
    self._segments = first or self._segments


set_buffers = Gradients.set_buffers


@ranks(1)
def test_every_naive_way_to_move_changes_bits() -> None:
    case = Case(name="naive", blocks=(), steps=16, clip=0.5, sometimes=True, unused=True, reload=(9, 14))
    stock = run_variant(case, None)

    def moved() -> list[str]:
        with random_moves(1, MoveCounts(), change_after=1.0):
            return differences(stock, run_variant(case, CPU))

    assert not moved()
    for owner, method, naive in (
        (Executor, "sync_states_to_host", lambda self: None),
        (ResidentStates, "load", load_nothing),
        (StateMemory, "_move_gradients", lambda self, units: None),
        (Gradients, "set_buffers", keep_first_segments),
    ):
        with mock.patch.object(owner, method, naive):
            found = moved()
        assert found, method


def running_plan(failure: BaseException) -> Any:
    """Return a plan of one unit, whose executor fails once to load it. Its memory and its executor are doubles."""
    memory, executor = (mock.create_autospec(kind, instance=True) for kind in (StateMemory, Executor))
    memory.units = []
    executor.load_plan.side_effect = [failure, None]
    elements = ElementRange(begin=0, end=8, sub_group_numel=8)
    buffers = [GradientBuffer(sub_group=0, elements=elements, grad=torch.zeros(8), device_accumulator=torch.zeros(8))]
    return RunningPlan(
        plan=UpdatePlan(workload=Workload.from_numels([8]), placements=(Placement.CPU,), num_slots=1),
        eager=frozenset(),
        memory=memory,
        executor=executor,
        gradients=Gradients(None, buffers, None),
        exposure=mock.create_autospec(Exposure, instance=True),
        windows=mock.create_autospec(MeasuredWindows, instance=True),
        gradient_buffers=lambda *_: buffers,
    )


def test_a_plan_that_is_set_in_part_ends_all_updates_unless_only_memory_is_missing() -> None:
    error = RuntimeError("the driver refuses to lock memory")
    running = running_plan(error)
    with pytest.raises(RuntimeError, match="refuses to lock"):
        running.restore()
    running.executor.fail.assert_called_once_with(error)
    running = running_plan(torch.OutOfMemoryError())
    assert not running.restore()
    assert running.is_evicted
    running.executor.fail.assert_not_called()
