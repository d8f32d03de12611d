"""Check that states fill the free memory of the GPU, leave it when it is short, and never cost an error or a bit."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stdout, suppress
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
from deep_opt_states.zero.step.gpu_memory import GpuBudget, GpuMemory
from deep_opt_states.zero.step.gradients import Gradients
from deep_opt_states.zero.step.watched_forwards import WatchedForwards
from tests.ranks import ranks
from tests.software_gpu.filled_gpu.growing_inputs import BYTES_PER_TOKEN, CASE, Seen, Step, train_on_gpu
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import GIB
from tests.tiers import thorough
from tests.zero.parity.case import Case
from tests.zero.parity.training import Block, Record, assert_same_bits, differences, gathered

pytestmark = [pytest.mark.P1, pytest.mark.P6]
BLOCK = CASE.blocks[0]
SHORT, LONGEST = 64, 6000
"""Tokens. The activations of the longest inputs take more memory than all states."""

MEMORY = GIB // 4
FIRST, FILLED = [Step((SHORT,))] * 8, [Step((SHORT,))] * 16
"""The memory of a GPU, and the steps in which it is filled, and more."""


def count(seen: Seen, placement: str = "cpu") -> list[int]:
    return [placed[placement] for placed in seen.placed]


def takes_memory(seen: Seen) -> bool:
    return min(count(seen)) < count(seen)[0]


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
    """Train while memory is short, bit-identical to stock, with equal plans on all ranks. Return also the log."""
    log = io.StringIO()
    with short, redirect_stdout(log):
        ours, seen = train_on_gpu(steps, BLOCK, memory_bytes)
    assert_same_bits(stock, ours)
    assert all(each == seen.fingerprints for each in gathered(seen.fingerprints))
    return seen, log.getvalue()


@ranks(1, thorough(2), group=software_process_group, timeout_s=600)
def test_states_fill_the_gpu_and_leave_it_on_all_ranks_when_memory_is_short_on_one() -> None:
    stock, _ = train_on_gpu(FILLED, None)
    default, log = trained(stock, FILLED, nullcontext())
    at_start, filled = count(default)[0], count(default)[-1]
    assert sum(default.placed[0].values()) == at_start > filled
    assert ("GPU memory for states 0.0 GB -> " in log) == (dist.get_rank() == 0)
    for short in (scripted(taken_bytes=MEMORY - 60 * 2**20), scripted(retries=1), failing_reservation()):
        seen, log = trained(stock, FILLED, short)
        assert min(count(seen)) == filled < count(seen)[-1]
    # After an allocation that fails, all states are evicted on that rank, and the next plan takes at most half.
    assert any(seen.evicted) >= last_rank()
    assert log.count("could not be reserved: a larger gpu_memory_margin_gb") == last_rank()
    if dist.get_world_size() > 1:
        trained(stock, FILLED, nullcontext(), MEMORY - 130 * 2**20 * last_rank())
    # The last rank has larger inputs after the GPU is filled.
    steps = [*FIRST, *[Step((2 * SHORT if last_rank() else SHORT,))] * 8]
    seen, _ = trained(train_on_gpu(steps, None)[0], steps, nullcontext())
    assert sum(seen.evicted) == last_rank(), "evicted once, on the last rank only"
    assert count(seen)[-1] == filled


_may_need_more = WatchedForwards._may_need_more


def _no_larger_inputs(forwards: WatchedForwards, inputs: object) -> bool:
    forwards._largest[()] = (0, 0)
    return _may_need_more(forwards, ())


Fault = tuple[tuple[Any, str, Any], ...]
NOT_BETWEEN_LAYERS = (GpuMemory, "is_short_now", lambda _: False)
"""Otherwise the growth is noticed between two layers."""

KEPT: Fault = ((WatchedForwards, "_may_need_more", _no_larger_inputs), NOT_BETWEEN_LAYERS)
UNHELD_IGNORES_NEED: Fault = ((GpuBudget, "limit", lambda *_: None),)
NOT_WRITTEN_BACK: Fault = ((Executor, "sync_states_to_host", lambda *_: None),)
SUMS_NOT_COPIED: Fault = ((Gradients, "copy_open_sums_to_host", lambda *_: None),)
# What the failed attempt has gathered is in use when the next one begins.
NOT_NOTICED: Fault = ((GpuMemory, "has_failed", False), (AllocatorWatch, "bytes_in_use", lambda _: 0))


@contextmanager
def with_fault(fault: Fault) -> Iterator[None]:
    with ExitStack() as patches:
        for patched in fault:
            patches.enter_context(mock.patch.object(*patched))
        yield


@dataclass(frozen=True)
class Growth:
    """A training run whose need for memory grows. It fails with the fault ``out_of_memory``, or has ``wrong_bits``."""

    memory_mib: int
    steps: list[Step]
    out_of_memory: Fault = ()
    wrong_bits: Fault = ()
    case: Case = CASE
    tries_again: bool = False

    def train(self, block: Block, fault: Fault = ()) -> tuple[Record, Seen]:
        memory_bytes = self.memory_mib * 2**20
        with with_fault(fault):
            return train_on_gpu(self.steps, block, memory_bytes, self.case, tries_again=self.tries_again)


AT_ONCE = {
    # The memory is what stock needs, to some MiB.
    "inputs": Growth(172, [*FIRST, *[Step((LONGEST,))] * 3], KEPT, NOT_WRITTEN_BACK),
    "inputs in a window": Growth(
        172,
        [*[Step((SHORT, SHORT))] * len(FIRST), *[Step((SHORT, LONGEST))] * 3],
        wrong_bits=SUMS_NOT_COPIED,
        # Only units that the CPU updates have sums on the GPU that an eviction frees.
        case=replace(CASE, blocks=({**BLOCK, "placement": [{"match": "layers.1.*", "states": "cpu"}]},)),
    ),
}
# Stock needs 160 MiB, and retries no allocation with 32 more, which is less than all states take. The budget is known
# after three steps, and the first plan that uses it is adopted in the backward of the sixth.
BEFORE_THE_PLAN = Growth(
    192,
    [*FIRST[:3], Step((LONGEST,)), *FIRST[:2], *[Step((LONGEST,))] * 2, *FIRST[:3], Step((LONGEST,))],
    UNHELD_IGNORES_NEED,
)

TOKENS = 16_000

BALANCED = 8


def by_values(memory_mib: int, margin_mib: int, grown: Step, fault: Fault, *small_layers: int, **others: Any) -> Growth:
    """Return a training run whose need grows by values, which inputs do not show. Stock leaves about 140 MiB free."""
    balanced = Step((TOKENS,), busiest=64)
    block = {**BLOCK, "gpu_memory_margin_gb": margin_mib * 2**20 / 1e9}
    case = replace(CASE, blocks=(block,), widths=(64, 3000, 3000, 64, *small_layers))
    return Growth(memory_mib, [*[balanced] * BALANCED, grown, grown, balanced, balanced], fault, case=case, **others)


def unbalanced(mib: int, *, in_backward: bool = False) -> Step:
    return Step((TOKENS,), busiest=mib * 2**20 // BYTES_PER_TOKEN, in_backward=in_backward)


BEYOND_THE_MARGIN = {
    "at once in forward": by_values(272, 4, unbalanced(46), NOT_NOTICED, tries_again=True),
    "at once in backward": by_values(272, 4, unbalanced(110, in_backward=True), NOT_NOTICED, tries_again=True),
}
# Six small layers follow the large ones, which need most memory in backward.
FROM_LAYER_TO_LAYER = by_values(312, 64, unbalanced(25), (NOT_BETWEEN_LAYERS,), *[64] * 6)


def check_bits(growth: Growth) -> Seen:
    """Train bit-identically to stock with the same memory, and differently if the fault is to give wrong bits."""
    stock, _ = growth.train(None)
    ours, seen = growth.train(growth.case.blocks[0])
    assert_same_bits(stock, ours)
    if growth.wrong_bits:
        assert differences(stock, growth.train(growth.case.blocks[0], growth.wrong_bits)[0])
    return seen


def check_memory(growth: Growth) -> Seen:
    """Check also that the GPU runs out of memory with the fault. After that, DeepSpeed keeps tensors of the engine."""
    seen = check_bits(growth)
    if growth.out_of_memory:
        with pytest.raises(torch.OutOfMemoryError):
            growth.train(growth.case.blocks[0], growth.out_of_memory)
    return seen


@pytest.mark.parametrize("name", ["inputs", *map(thorough, list(AT_ONCE)[1:])])
@ranks(1, group=software_process_group, timeout_s=600)
def test_a_need_that_grows_is_met_and_not_with_a_fault(name: str) -> None:
    seen = check_memory(AT_ONCE[name])
    assert any(seen.evicted)
    assert takes_memory(seen)


@ranks(1, group=software_process_group, timeout_s=600)
def test_a_need_that_grows_between_the_first_steps_and_the_first_plan_is_met() -> None:
    """Check that no memory is taken, since none is free at the peak; with the fault, a plan takes it."""
    growth = BEFORE_THE_PLAN
    assert not takes_memory(check_bits(growth))
    with suppress(torch.OutOfMemoryError):
        assert takes_memory(growth.train(growth.case.blocks[0], growth.out_of_memory)[1])


@pytest.mark.thorough
@ranks(1, group=software_process_group, timeout_s=600)
def test_states_leave_within_a_forward_that_takes_half_of_the_margin() -> None:
    seen = check_memory(FROM_LAYER_TO_LAYER)
    assert not any(seen.failed)
    assert sum(seen.evicted) == 2, "within a forward, the memory is given back a step earlier"
    assert count(seen, "resident")[BALANCED - 1] > count(seen, "resident")[-1]


@pytest.mark.parametrize("name", ["at once in forward", thorough("at once in backward")])
@ranks(1, group=software_process_group, timeout_s=600)
def test_after_growth_beyond_the_margin_the_same_batch_succeeds_bit_identically_to_stock(name: str) -> None:
    seen = check_memory(BEYOND_THE_MARGIN[name])
    steps = range(len(seen.failed))
    assert seen.failed == [step == BALANCED for step in steps]
    # The windows are measured again in one step, in which the CPU updates all units.
    assert seen.evicted == [step in (BALANCED, BALANCED + 1) for step in steps]
    assert count(seen, "resident")[BALANCED] > count(seen, "resident")[BALANCED + 2]
