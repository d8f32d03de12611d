"""Check that states fill the free memory of the GPU, leave it when it is short, and never cost an error or a bit."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stdout
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
from deep_opt_states.zero.step.gradients import Gradients
from tests.ranks import on_ranks
from tests.software_gpu.filled_gpu.growing_inputs import (
    BYTES_PER_TOKEN,
    CASE,
    Step,
    memory_that_stock_needs,
    train_on_gpu,
)
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import GIB
from tests.tiers import thorough
from tests.zero.parity.case import Case
from tests.zero.parity.training import Record, differences

Answer = dict[str, Any]

BLOCK = CASE.blocks[0]
SHORT, LONGEST = 64, 6000
"""Tokens. The activations of the longest inputs take more memory than all states."""

SPARE = 32 * 2**20
"""Memory with which stock retries no allocation, and which is less than all states take."""

MEMORY = GIB // 4
FIRST, FILLED = [Step((SHORT,))] * 8, [Step((SHORT,))] * 16
"""The memory of a GPU, and the steps in which it is filled, and more."""

_STOCK: dict[str, Record] = {}
"""The records of stock by the steps of all ranks, the memory and the case. Faults and blocks do not change them."""


def compare(
    steps: list[Step],
    memory_bytes: int,
    fault: AbstractContextManager[Any] | None = None,
    case: Case = CASE,
    *,
    tries_again: bool = False,
) -> Answer:
    """Train with stock and with the plugin on the same GPU, and return what differs, and what the plugin has done.

    If ``tries_again``, the plugin may train a micro-batch once more after an out-of-memory error.
    """
    # The steps of all ranks: stock must train on all of them or on none.
    keys = [""] * dist.get_world_size()
    dist.all_gather_object(keys, repr((steps, memory_bytes, replace(case, blocks=()))))
    key = "\n".join(keys)
    if key not in _STOCK:
        _STOCK[key], _ = train_on_gpu(steps, None, memory_bytes, case)
    log = io.StringIO()
    try:
        with fault or nullcontext(), redirect_stdout(log):
            ours, seen = train_on_gpu(steps, case.blocks[0], memory_bytes, case, tries_again=tries_again)
    except torch.OutOfMemoryError:
        return {"error": "OutOfMemoryError", "log": log.getvalue()}
    return {"error": "", "differences": differences(_STOCK[key], ours), "log": log.getvalue(), **vars(seen)}


def on_gpus(world_size: int, train: Callable[..., dict[str, Answer]], *arguments: Any) -> list[dict[str, Answer]]:
    return on_ranks(world_size, train, *arguments, group=software_process_group, timeout_s=600)


def on_cpu(answer: Answer) -> list[int]:
    """Return the number of units that the CPU updates, after each step."""
    return [placed["cpu"] for placed in answer["placed"]]


def takes_memory(answer: Answer) -> bool:
    """Return whether units took memory of the GPU that they did not have after the first step."""
    return min(on_cpu(answer)) < on_cpu(answer)[0]


# Short memory


def last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def larger_on_one_rank() -> list[Step]:
    """Return the steps of this rank. The last rank has larger inputs after the GPU is filled."""
    return [*FIRST, *[Step((2 * SHORT if last_rank() else SHORT,))] * 8]


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


def demotions() -> dict[str, Answer]:
    """Lower the memory that is free, by retries, by a decrease of free memory, and by failing allocations."""
    answers = {
        "default": compare(FILLED, MEMORY),
        "shrinking memory": compare(FILLED, MEMORY, scripted(taken_bytes=MEMORY - 60 * 2**20)),
        "retries": compare(FILLED, MEMORY, scripted(retries=1)),
        "an allocation that fails": compare(FILLED, MEMORY, failing_reservation()),
        "larger inputs of one rank": compare(larger_on_one_rank(), MEMORY),
    }
    if dist.get_world_size() > 1:
        answers["less memory on one rank"] = compare(FILLED, MEMORY - 130 * 2**20 * last_rank())
    return answers


@pytest.mark.P1
@pytest.mark.P6
@pytest.mark.parametrize("world_size", [1, thorough(2)])
def test_states_fill_the_gpu_and_leave_it_on_all_ranks_when_memory_is_short_on_one(world_size: int) -> None:
    answers = on_gpus(world_size, demotions)
    first, last = answers[0], answers[-1]
    for name, answer in first.items():
        for other in (ranked[name] for ranked in answers):
            assert (other["error"], other["differences"]) == ("", []), name
            assert other["fingerprints"] == answer["fingerprints"], name
    evicted = [sum(ranked["larger inputs of one rank"]["evicted"]) for ranked in answers]
    assert evicted == [0] * (world_size - 1) + [1], "evicted once, on the last rank only"
    at_start, filled = on_cpu(first["default"])[0], on_cpu(first["default"])[-1]
    assert sum(first["default"]["placed"][0].values()) == at_start > filled
    # After an allocation that fails, all states are evicted on that rank, and the next plan takes at most half.
    for name in ("shrinking memory", "retries", "an allocation that fails"):
        cpu = on_cpu(first[name])
        assert min(cpu) == filled < cpu[-1], name
    assert any(last["an allocation that fails"]["evicted"])
    assert on_cpu(first["larger inputs of one rank"])[-1] == filled
    assert "GPU memory for states 0.0 GB -> " in first["default"]["log"]
    assert last["an allocation that fails"]["log"].count("could not be reserved: a larger gpu_memory_margin_gb") == 1


# Growing need


_evict = GpuMemory.evict
_may_need_more = WatchedForwards._may_need_more


def _evict_with_known_need(memory: GpuMemory, reason: str) -> None:
    _evict(memory, reason)
    memory._need_is_known = True


def _no_larger_inputs(forwards: WatchedForwards, inputs: object) -> bool:
    """Compare only the memory in use."""
    forwards._largest[()] = (0, 0)
    return _may_need_more(forwards, ())


Fault = tuple[tuple[Any, str, Any], ...]
NOT_BETWEEN_LAYERS = (GpuMemory, "is_short_now", lambda _: False)
"""Otherwise the growth is noticed between two layers."""

KEPT: Fault = ((WatchedForwards, "_may_need_more", _no_larger_inputs), NOT_BETWEEN_LAYERS)
USE_IGNORED: Fault = ((AllocatorWatch, "bytes_in_use", lambda _: 0), NOT_BETWEEN_LAYERS)
UNHELD_IGNORES_NEED: Fault = ((GpuBudget, "limit", lambda *_: None),)
UNKNOWN_NEED: Fault = ((GpuMemory, "evict", _evict_with_known_need),)
NOT_WRITTEN_BACK: Fault = ((Executor, "sync_states_to_host", lambda *_: None),)
SUMS_NOT_COPIED: Fault = ((Gradients, "copy_open_sums_to_host", lambda *_: None),)


@dataclass(frozen=True)
class Growth:
    """A training that needs more memory from one forward to the next.

    With ``out_of_memory`` it fails, and with ``wrong_bits`` it has others than stock. The GPU has ``memory_mib``, or
    the need of stock and ``spare_bytes`` beyond it. With little of those, stock retries no allocation. If
    ``tries_again``, the script trains a micro-batch once more after an out-of-memory error.
    """

    steps: list[Step]
    out_of_memory: Fault = ()
    wrong_bits: Fault = ()
    case: Case = CASE
    spare_bytes: int = 0
    memory_mib: int | None = None
    tries_again: bool = False


AT_ONCE = {
    "inputs": Growth([*FIRST, *[Step((LONGEST,))] * 3], KEPT, NOT_WRITTEN_BACK),
    "inputs in a window": Growth(
        [*[Step((SHORT, SHORT))] * len(FIRST), *[Step((SHORT, LONGEST))] * 3],
        wrong_bits=SUMS_NOT_COPIED,
        # Only units that the CPU updates have sums on the GPU that an eviction frees.
        case=replace(CASE, blocks=({**BLOCK, "placement": [{"match": "layers.1.*", "states": "cpu"}]},)),
    ),
    # The first forward without gradients has larger inputs than all before.
    "cache": Growth(
        [Step((SHORT,), evaluated=SHORT), *FIRST, Step((SHORT,), generated=3 * LONGEST), *FIRST[:2]], USE_IGNORED
    ),
    # With fewer parameters, all states fit beside the activations where stock copies gradients.
    "inputs, parameters in host memory": Growth(
        [*FIRST, Step((LONGEST,)), Step((SHORT,), evaluated=LONGEST), Step((LONGEST,))],
        KEPT,
        NOT_WRITTEN_BACK,
        replace(CASE, offload_param=True, widths=(64, 3000, 3000, 64)),
    ),
}
BEFORE_THE_PLAN = {
    # The budget is known after three steps, and the first plan that uses it is adopted in the backward of the sixth.
    "inputs before the plan holds memory": Growth(
        [*FIRST[:3], Step((LONGEST,)), *FIRST[:2], *[Step((LONGEST,))] * 2, *FIRST[:3], Step((LONGEST,))],
        UNHELD_IGNORES_NEED,
        spare_bytes=SPARE,
    ),
    "inputs while the plan takes memory": Growth(
        [*FIRST[:5], *[Step((LONGEST,))] * 3, *FIRST[:3], Step((LONGEST,))], UNKNOWN_NEED, spare_bytes=SPARE
    ),
}


MEMORY_MIB = 272
"""The memory of the GPU of the trainings below. Stock leaves about 140 MiB of it free, and all states take less."""

TOKENS = 16_000
"""The tokens of each micro-batch. Only their distribution over the experts changes."""

BALANCED = 8
"""The steps before the growth."""

WIDTHS = (64, 3000, 3000, 64)


def by_values(margin_mib: int, steps: list[Step], fault: Fault = (), *small_layers: int, **others: Any) -> Growth:
    """Return a training whose need grows by values, which the inputs do not show."""
    balanced = Step((TOKENS,), busiest=64)
    block = {**BLOCK, "gpu_memory_margin_gb": margin_mib * 2**20 / 1e9}
    case = replace(CASE, blocks=(block,), widths=(*WIDTHS, *small_layers))
    steps = [*[balanced] * BALANCED, *steps, *[balanced] * 2]
    return Growth(steps, fault, case=case, **{"memory_mib": MEMORY_MIB, **others})


def unbalanced(mib: int, *, in_backward: bool = False) -> Step:
    """Return a step whose layers keep so much memory each, or need it one after the other in backward."""
    return Step((TOKENS,), busiest=mib * 2**20 // BYTES_PER_TOKEN, in_backward=in_backward)


# What the failed attempt has gathered is in use when the next one begins.
NOT_NOTICED: Fault = ((GpuMemory, "has_failed", False), (AllocatorWatch, "bytes_in_use", lambda _: 0))

BY_VALUES = {
    "within the margin": by_values(64, [unbalanced(56, in_backward=True)] * 2),
    "in small steps": by_values(
        64, [unbalanced(mib, in_backward=True) for mib in range(26, 131, 26)], UNHELD_IGNORES_NEED
    ),
    # Six small layers follow the large ones, which need most memory in backward.
    "from layer to layer": by_values(
        64, [unbalanced(25)] * 2, (NOT_BETWEEN_LAYERS,), *[64] * 6, memory_mib=MEMORY_MIB + 40
    ),
    "at once in forward": by_values(4, [unbalanced(46)] * 2, NOT_NOTICED, tries_again=True),
    "at once in backward": by_values(4, [unbalanced(110, in_backward=True)] * 2, NOT_NOTICED, tries_again=True),
}
GROWTHS = {**AT_ONCE, **BEFORE_THE_PLAN, **BY_VALUES}


@contextmanager
def with_fault(fault: Fault) -> Iterator[None]:
    with ExitStack() as patches:
        for patched in fault:
            patches.enter_context(mock.patch.object(*patched))
        yield


def grow(name: str) -> dict[str, Answer]:
    """Train on a GPU that stock fills when its need is largest, and with each fault that must show then.

    After an error, DeepSpeed keeps tensors of the engine before, and the memory beside them is free for the next. So
    each growth has a process of its own.
    """
    growth = GROWTHS[name]
    if growth.memory_mib is None:
        memory_bytes = memory_that_stock_needs(growth.steps, growth.case) + growth.spare_bytes
    else:
        memory_bytes = growth.memory_mib * 2**20
    answers = {}
    for kind, fault in {"": (), "out_of_memory": growth.out_of_memory, "wrong_bits": growth.wrong_bits}.items():
        if fault or not kind:
            context = with_fault(fault)
            answers[kind] = compare(growth.steps, memory_bytes, context, growth.case, tries_again=growth.tries_again)
    return answers


@pytest.mark.P1
@pytest.mark.P6
@pytest.mark.parametrize("name", ["inputs", *map(thorough, list(AT_ONCE)[1:])])
def test_a_need_that_grows_is_met_and_not_with_a_fault(name: str) -> None:
    (answers,) = on_gpus(1, grow, name)
    found = answers[""]
    assert (found["error"], found["differences"]) == ("", [])
    assert any(found["evicted"])
    assert takes_memory(found)
    if GROWTHS[name].out_of_memory:
        assert answers["out_of_memory"]["error"] == "OutOfMemoryError"
    if GROWTHS[name].wrong_bits:
        assert answers["wrong_bits"]["differences"]


@pytest.mark.P1
@pytest.mark.P6
@pytest.mark.parametrize(
    "name", ["inputs before the plan holds memory", thorough("inputs while the plan takes memory")]
)
def test_a_need_that_grows_between_the_first_steps_and_the_first_plan_is_met(name: str) -> None:
    """Check that no memory is taken, since none is free at the peak; with the fault, a plan takes it."""
    (answers,) = on_gpus(1, grow, name)
    found, fault = answers[""], answers["out_of_memory"]
    assert (found["error"], found["differences"]) == ("", [])
    assert not takes_memory(found)
    assert fault["error"] == "OutOfMemoryError" or takes_memory(fault)


def trained(name: str) -> Answer:
    """Return what the plugin has done, with stock's bits, and both logs. With the fault, it runs out of memory."""
    (answers,) = on_gpus(1, grow, name)
    assert (answers[""]["error"], answers[""]["differences"]) == ("", [])
    if GROWTHS[name].out_of_memory:
        assert answers["out_of_memory"]["error"] == "OutOfMemoryError"
        answers[""]["log"] += answers["out_of_memory"]["log"]
    return answers[""]


def residents(answer: dict[str, Any]) -> list[int]:
    """Return the number of resident units after each step."""
    return [placed["resident"] for placed in answer["placed"]]


@pytest.mark.P1
@pytest.mark.P6
@pytest.mark.parametrize("growth", list(map(thorough, ("within the margin", "in small steps", "from layer to layer"))))
def test_growth_that_fits_into_the_margin_is_met_and_states_leave(growth: str) -> None:
    answer = trained(growth)
    assert not any(answer["failed"])
    in_forward = growth == "from layer to layer"
    assert sum(answer["evicted"]) == 1 + in_forward, "within a forward, the memory is given back a step earlier"
    assert residents(answer)[BALANCED - 1] > residents(answer)[-1]
    if growth == "within the margin":
        assert answer["evicted"][BALANCED + 1], "at the next border"
    else:
        assert "an allocation has failed while optimizer states hold" in answer["log"]
        assert "a larger gpu_memory_margin_gb leaves more memory free" in answer["log"]


@pytest.mark.P1
@pytest.mark.P6
@pytest.mark.parametrize("growth", ["at once in forward", thorough("at once in backward")])
def test_after_growth_beyond_the_margin_the_same_batch_succeeds_with_the_bits_of_stock(growth: str) -> None:
    answer = trained(growth)
    steps = range(len(answer["failed"]))
    assert answer["failed"] == [step == BALANCED for step in steps]
    # The windows are measured again in one step, in which the CPU updates all units.
    assert answer["evicted"] == [step in (BALANCED, BALANCED + 1) for step in steps]
    assert residents(answer)[BALANCED] > residents(answer)[BALANCED + 2]
    assert "evicted after an allocation has failed." in answer["log"]
