"""Check that states fill the free memory of the GPU, leave it when it is short, and never cost an error or a bit."""

from __future__ import annotations

import io
from contextlib import AbstractContextManager, ExitStack, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deep_opt_states.device import cuda
from deep_opt_states.device.cuda import AllocatorWatch
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.state import Slot
from deep_opt_states.zero.step.gpu_memory import GpuBudget, GpuMemory, WatchedForwards
from tests.ranks import ranks
from tests.software_gpu.filled_gpu.growing_inputs import BYTES_PER_TOKEN, CASE, Seen, Step, train_on_gpu
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import GIB
from tests.tiers import thorough
from tests.zero.parity.case import Case
from tests.zero.parity.training import Block, Record, assert_same_bits, differences

BLOCK = CASE.blocks[0]
SHORT, LONGEST = 64, 6000
"""Tokens. The activations of the longest inputs take more memory than all states."""

MEMORY = GIB // 4
FIRST, FILLED = [Step((SHORT,))] * 8, [Step((SHORT,))] * 16
"""The memory of a GPU, and the steps in which it is filled, and more."""


def on_cpu(seen: Seen) -> list[int]:
    """Return the number of units that the CPU updates, after each step."""
    return [placed["cpu"] for placed in seen.placed]


def takes_memory(seen: Seen) -> bool:
    """Return whether units took memory of the GPU that they did not have after the first step."""
    return min(on_cpu(seen)) < on_cpu(seen)[0]


# Short memory


def last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def scripted(*, after: int = 10, taken_bytes: int = 0, retries: int = 0) -> AbstractContextManager[Any]:
    """Return a context in which memory is short after so many steps, on the last rank only."""
    calls, observed = 0, cuda.free_and_retries

    def with_less(*mark: Any) -> tuple[int, int]:
        nonlocal calls
        calls += 1
        free, before = observed(*mark)
        short = last_rank() and calls > after
        return free - (taken_bytes if short else 0), before + (retries if short else 0)

    return mock.patch.object(cuda, "free_and_retries", with_less)


def failing_reservation() -> AbstractContextManager[Any]:
    """Return a context in which the third reservation fails, on the last rank only."""
    reserve, calls = Slot.reserve, 0

    def reserved(*args: Any, **kwargs: Any) -> Slot:
        nonlocal calls
        calls += 1
        if last_rank() and calls == 3:
            raise torch.OutOfMemoryError("no memory")
        return reserve(*args, **kwargs)

    return mock.patch.object(Slot, "reserve", reserved)


def trained(
    stock: Record, steps: list[Step], short: AbstractContextManager[Any], memory_bytes: int = MEMORY
) -> tuple[Seen, str]:
    """Train while memory is short, with the bits of stock and equal plans on all ranks. Return also the log."""
    log = io.StringIO()
    with short, redirect_stdout(log):
        ours, seen = train_on_gpu(steps, BLOCK, memory_bytes)
    assert_same_bits(stock, ours)
    fingerprints: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(fingerprints, seen.fingerprints)
    assert fingerprints.count(seen.fingerprints) == len(fingerprints)
    return seen, log.getvalue()


@pytest.mark.P1
@pytest.mark.P6
@ranks(1, thorough(2), group=software_process_group, timeout_s=600)
def test_states_fill_the_gpu_and_leave_it_on_all_ranks_when_memory_is_short_on_one() -> None:
    stock, _ = train_on_gpu(FILLED, None)
    default, log = trained(stock, FILLED, nullcontext())
    at_start, filled = on_cpu(default)[0], on_cpu(default)[-1]
    assert sum(default.placed[0].values()) == at_start > filled
    assert ("GPU memory for states 0.0 GB -> " in log) == (dist.get_rank() == 0)
    for short in (scripted(taken_bytes=MEMORY - 60 * 2**20), scripted(retries=1), failing_reservation()):
        seen, log = trained(stock, FILLED, short)
        assert min(on_cpu(seen)) == filled < on_cpu(seen)[-1]
    # After an allocation that fails, all states are evicted on that rank, and the next plan takes at most half.
    assert any(seen.evicted) >= last_rank()
    assert log.count("could not be reserved: a larger gpu_memory_margin_gb") == last_rank()
    if dist.get_world_size() > 1:
        trained(stock, FILLED, nullcontext(), MEMORY - 130 * 2**20 * last_rank())
    # The last rank has larger inputs after the GPU is filled.
    steps = [*FIRST, *[Step((2 * SHORT if last_rank() else SHORT,))] * 8]
    seen, _ = trained(train_on_gpu(steps, None)[0], steps, nullcontext())
    assert sum(seen.evicted) == last_rank(), "evicted once, on the last rank only"
    assert on_cpu(seen)[-1] == filled


# Growing need


_may_need_more = WatchedForwards._may_need_more


def _no_larger_inputs(forwards: WatchedForwards, inputs: object) -> bool:
    """Compare only the memory in use."""
    forwards._largest[()] = (0, 0)
    return _may_need_more(forwards, ())


Fault = tuple[tuple[Any, str, Any], ...]
# Otherwise the growth is noticed between two layers.
KEPT: Fault = (
    (WatchedForwards, "_may_need_more", _no_larger_inputs),
    (GpuMemory, "is_short_now", lambda _: False),
)
UNHELD_IGNORES_NEED: Fault = ((GpuBudget, "limit", lambda *_: None),)
NOT_WRITTEN_BACK: Fault = ((Executor, "sync_states_to_host", lambda *_: None),)
# What the failed attempt has gathered is in use when the next one begins.
NOT_NOTICED: Fault = ((GpuMemory, "has_failed", False), (AllocatorWatch, "bytes_in_use", lambda _: 0))


@dataclass(frozen=True)
class Growth:
    """A training that needs more memory from one forward to the next, on a GPU with ``memory_mib``.

    If ``tries_again``, the script trains a micro-batch once more after an out-of-memory error.
    """

    memory_mib: int
    steps: list[Step]
    case: Case = CASE
    tries_again: bool = False

    def train(self, fault: Fault = (), block: Block = BLOCK) -> tuple[Record, Seen]:
        with ExitStack() as patches:
            for patched in fault:
                patches.enter_context(mock.patch.object(*patched))
            return train_on_gpu(self.steps, block, self.memory_mib * 2**20, self.case, tries_again=self.tries_again)

    def check_bits(self) -> tuple[Record, Seen]:
        """Train with the bits of stock, which has the same memory."""
        (stock, _), (ours, seen) = self.train(block=None), self.train()
        assert_same_bits(stock, ours)
        return stock, seen


@pytest.mark.P1
@pytest.mark.P6
@ranks(1, group=software_process_group, timeout_s=600)
def test_a_need_that_grows_is_met_and_not_with_a_fault() -> None:
    """Check it with the memory that stock needs, to some MiB. After an error, DeepSpeed keeps tensors of the engine."""
    growth = Growth(172, [*FIRST, *[Step((LONGEST,))] * 3])
    stock, seen = growth.check_bits()
    assert any(seen.evicted)
    assert takes_memory(seen)
    assert differences(stock, growth.train(NOT_WRITTEN_BACK)[0])
    with pytest.raises(torch.OutOfMemoryError):
        growth.train(KEPT)


@pytest.mark.P1
@pytest.mark.P6
@ranks(1, group=software_process_group, timeout_s=600)
def test_a_need_that_grows_between_the_first_steps_and_the_first_plan_is_met() -> None:
    """Check that no memory is taken, since none is free at the peak; with the fault, a plan takes it."""
    # Stock needs 160 MiB, and retries no allocation with 32 more, which is less than all states take. The budget is
    # known after three steps, and the first plan that uses it is adopted in the backward of the sixth.
    long = Step((LONGEST,))
    growth = Growth(192, [*FIRST[:3], long, *FIRST[:2], long, long, *FIRST[:3], long])
    assert not takes_memory(growth.check_bits()[1])
    with suppress(torch.OutOfMemoryError):
        assert takes_memory(growth.train(UNHELD_IGNORES_NEED)[1])


TOKENS, BALANCED = 16_000, 8
"""The tokens of each micro-batch, of which only the distribution over the experts changes, and the steps before."""


@pytest.mark.P1
@pytest.mark.P6
@ranks(1, group=software_process_group, timeout_s=600)
def test_after_growth_beyond_the_margin_the_same_batch_succeeds_with_the_bits_of_stock() -> None:
    # Stock leaves about 140 MiB free, and all states take less. Layers keep 46 MiB each in the steps that have grown.
    steady, grown = (Step((TOKENS,), busiest=tokens) for tokens in (64, 46 * 2**20 // BYTES_PER_TOKEN))
    steps = [*[steady] * BALANCED, grown, grown, steady, steady]
    growth = Growth(272, steps, replace(CASE, widths=(64, 3000, 3000, 64)), tries_again=True)
    _, seen = growth.check_bits()
    assert seen.failed == [step == BALANCED for step in range(len(steps))]
    # The windows are measured again in one step, in which the CPU updates all units.
    assert seen.evicted == [step in (BALANCED, BALANCED + 1) for step in range(len(steps))]
    assert seen.placed[BALANCED]["resident"] > seen.placed[BALANCED + 2]["resident"]
    with pytest.raises(torch.OutOfMemoryError):
        growth.train(NOT_NOTICED)
