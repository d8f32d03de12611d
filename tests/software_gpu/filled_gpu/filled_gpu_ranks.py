"""Train on GPUs of which stock needs all, some or little memory, and print what the plugin has done with the rest.

Argument: the name of a selection, see ``SELECTIONS``. Every rank prints one answer per training.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from deep_opt_states.device import cuda
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.state import Slot
from deep_opt_states.zero.step.gpu_memory import GpuBudget, GpuMemory, WatchedForwards
from deep_opt_states.zero.step.gradients import Gradients
from deep_opt_states.zero.step.running_plan import RunningPlan
from tests.launch import answer
from tests.software_gpu.filled_gpu.growing_inputs import CASE, Step, memory_that_stock_needs, train_on_gpu
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import GIB
from tests.zero.parity.case import Case
from tests.zero.parity.training import Record, differences

BLOCK = CASE.blocks[0]
SHORT, LONGEST = 64, 6000
"""Tokens. The activations of the longest inputs take more memory than all states."""

SPARE = 32 * 2**20
"""Memory with which stock retries no allocation, and which is less than all states take."""

FIRST = [Step((SHORT,))] * 8
"""The steps in which the GPU is filled."""

_STOCK: dict[str, Record] = {}
"""The records of stock by the steps of all ranks, the memory and the case. Faults and blocks do not change them."""


_evict = GpuMemory.evict


def _evict_with_known_need(memory: GpuMemory, reason: str) -> None:
    _evict(memory, reason)
    memory._need_is_known = True


_may_need_more = WatchedForwards._may_need_more


def _no_larger_inputs(forwards: WatchedForwards, inputs: object) -> bool:
    """Compare only the memory in use."""
    forwards._largest[()] = (0, 0)
    return _may_need_more(forwards, ())


KEPT = "memory is kept before larger inputs"
UNHELD_IGNORES_NEED = "memory that is not held yet ignores the need"
UNKNOWN_NEED = "a plan takes memory before the need is known"
USE_IGNORED = "memory in use before a forward is ignored"

FAULTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    KEPT: (WatchedForwards, "_may_need_more", _no_larger_inputs),
    USE_IGNORED: (cuda.AllocatorWatch, "bytes_in_use", lambda _: 0),
    UNHELD_IGNORES_NEED: (GpuBudget, "limit", lambda *_: None),
    UNKNOWN_NEED: (GpuMemory, "evict", _evict_with_known_need),
    "evicted states are not written back": (Executor, "sync_states_to_host", lambda *_: None),
    "open sums are not copied": (Gradients, "copy_open_sums_to_host", lambda *_: None),
}
"""Faults by name: the class, the method, and its replacement."""


@dataclass(frozen=True)
class Growth:
    """A training that needs more memory from one forward to the next, and the faults that must show then.

    ``spare_bytes`` is the memory of the GPU beyond the need of stock. With little of it, stock retries no allocation.
    """

    steps: list[Step]
    faults: tuple[str, ...] = ()
    case: Case = CASE
    spare_bytes: int = 0


GROWTH = {
    "inputs": Growth([*FIRST, *[Step((LONGEST,))] * 3], (KEPT, "evicted states are not written back")),
    "inputs in a window": Growth(
        [*[Step((SHORT, SHORT))] * len(FIRST), *[Step((SHORT, LONGEST))] * 3],
        ("open sums are not copied",),
        # Only units that the CPU updates have sums on the GPU that an eviction frees.
        replace(CASE, blocks=({**BLOCK, "placement": [{"match": "layers.1.*", "states": "cpu"}]},)),
    ),
    "cache": Growth(
        # The first forward without gradients has larger inputs than all before.
        [Step((SHORT,), evaluated=SHORT), *FIRST, Step((SHORT,), generated=3 * LONGEST), *FIRST[:2]],
        (USE_IGNORED,),
    ),
    "inputs, parameters in host memory": Growth(
        [*FIRST, Step((LONGEST,)), Step((SHORT,), evaluated=LONGEST), Step((LONGEST,))],
        (KEPT, "evicted states are not written back"),
        # With fewer parameters, all states fit beside the activations where stock copies gradients.
        replace(CASE, offload_param=True, widths=(64, 3000, 3000, 64)),
    ),
    # The budget is known after three steps, and the first plan that uses it is adopted in the backward of the sixth.
    "inputs before the plan holds memory": Growth(
        [*FIRST[:3], Step((LONGEST,)), *FIRST[:2], *[Step((LONGEST,))] * 2, *FIRST[:3], Step((LONGEST,))],
        (UNHELD_IGNORES_NEED,),
        spare_bytes=SPARE,
    ),
    "inputs while the plan takes memory": Growth(
        [*FIRST[:5], *[Step((LONGEST,))] * 3, *FIRST[:3], Step((LONGEST,))], (UNKNOWN_NEED,), spare_bytes=SPARE
    ),
}
"""Trainings whose need grows at once.

Each is trained in a process of its own: after an error, DeepSpeed keeps tensors of the engine before, and the memory
beside them is free for the next.
"""


def ramp(seed: int, micro_batches: int = 1) -> list[Step]:
    """Return steps whose inputs grow to the longest, by random amounts, with evaluations in between."""
    chance = random.Random(seed)
    lengths = sorted({LONGEST, *(chance.randrange(SHORT, LONGEST) for _ in range(4))})
    steps = [Step((SHORT,) * micro_batches)] * len(FIRST)
    for tokens in lengths:
        grown = tuple(chance.randint(SHORT, tokens) for _ in range(micro_batches - 1))
        steps.append(Step((*grown, tokens), evaluated=chance.choice((None, tokens, SHORT))))
        steps += [Step((tokens,) * micro_batches)] * chance.randint(0, 2)
    return steps


SMALL_UNITS = replace(CASE, blocks=({**BLOCK, "unit_size": 50_000},))
"""A case whose states fill the free memory closely. Larger units leave a rest, in which a fault does not show."""

RAMPS = {
    f"ramp {seed}": Growth(ramp(seed, 1 + seed % 2), (KEPT,) if seed in (1, 4) else (), SMALL_UNITS)
    for seed in range(10)
}
"""Trainings whose inputs grow by random amounts, each in a process of its own, too.

Where no fault is given, the growth is slow enough for the budget to shrink in time, it shows in the memory in use, or
it comes while the states are evicted because memory was short.
"""


def compare(
    name: str,
    steps: list[Step],
    memory_bytes: int,
    fault: AbstractContextManager[Any] | None = None,
    case: Case = CASE,
    *,
    tries_again: bool = False,
) -> None:
    """Train with stock and with the plugin on the same GPU, and print the answer. Stock trains the same once only.

    If ``tries_again``, the plugin may train a micro-batch once more after an out-of-memory error.
    """
    # The steps of all ranks: stock must train on all of them or on none.
    keys = [""] * dist.get_world_size()
    dist.all_gather_object(keys, repr((steps, memory_bytes, replace(case, blocks=()))))
    key = "\n".join(keys)
    if key not in _STOCK:
        _STOCK[key], _ = train_on_gpu(steps, None, memory_bytes, case)
    stock = _STOCK[key]
    result: dict[str, Any] = {"name": name, "error": ""}
    try:
        with fault or nullcontext():
            ours, seen = train_on_gpu(steps, case.blocks[0], memory_bytes, case, tries_again=tries_again)
        result |= {"differences": differences(stock, ours), **vars(seen)}
    except torch.OutOfMemoryError as error:
        result["error"] = type(error).__name__
    answer(result)


def grow(name: str, growth: Growth) -> None:
    """Train on a GPU that stock fills when its need is largest, and with each fault that must show then."""
    need = memory_that_stock_needs(growth.steps, growth.case) + growth.spare_bytes
    compare(name, growth.steps, need, case=growth.case)
    for fault in growth.faults:
        with ExitStack() as faults:
            if fault in (KEPT, USE_IGNORED):
                # Otherwise the growth is noticed between two layers.
                faults.enter_context(mock.patch.object(GpuMemory, "is_short_now", return_value=False))
            compare(fault, growth.steps, need, mock.patch.object(*FAULTS[fault]), growth.case)


def without_memory_once() -> AbstractContextManager[Any]:
    """Return a context in which the first allocations to restore memory fail."""
    restore = RunningPlan.restore
    attempts = 0

    def restore_without_memory(self: RunningPlan) -> bool:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            with mock.patch.object(Slot, "reserve", side_effect=torch.OutOfMemoryError("no memory")):
                return restore(self)
        return restore(self)

    return mock.patch.object(RunningPlan, "restore", restore_without_memory)


MEMORY = GIB // 4
FILLED = [Step((SHORT,))] * 16
"""The memory of a GPU and the steps in which it is filled, and more."""


def last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def larger_on_one_rank() -> list[Step]:
    """Return the steps of this rank. The last rank has larger inputs after the GPU is filled."""
    return [*FIRST, *[Step((2 * SHORT if last_rank() else SHORT,))] * 8]


def demotions() -> None:
    """Lower the memory that is free, by retries, by a decrease of free memory, and by failing allocations."""

    def scripted(*, taken_bytes: int = 0, retries: int = 0) -> AbstractContextManager[Any]:
        """Return a context in which memory is short from the 11th step on, on the last rank only."""
        calls, observed = 0, cuda.free_and_retries

        def with_less(*mark: Any) -> tuple[int, int]:
            nonlocal calls
            calls += 1
            free, before = observed(*mark)
            short = last_rank() and calls > 10
            return free - (taken_bytes if short else 0), before + (retries if short else 0)

        return mock.patch.object(cuda, "free_and_retries", with_less)

    compare("default", FILLED, MEMORY)
    if dist.get_world_size() > 1:
        compare("less memory on one rank", FILLED, MEMORY - 130 * 2**20 * last_rank())
    compare("shrinking memory", FILLED, MEMORY, scripted(taken_bytes=MEMORY - 60 * 2**20))
    compare("retries", FILLED, MEMORY, scripted(retries=1))
    reserve, calls = Slot.reserve, 0

    def failing(*args: Any, **kwargs: Any) -> Slot:
        nonlocal calls
        calls += 1
        if last_rank() and calls == 3:
            raise torch.OutOfMemoryError("no memory")
        return reserve(*args, **kwargs)

    compare("an allocation that fails", FILLED, MEMORY, mock.patch.object(Slot, "reserve", failing))
    compare("larger inputs of one rank", larger_on_one_rank(), MEMORY)


def restorations() -> None:
    """Reserve memory again after larger inputs, with a rule and without, and let it fail."""
    larger = larger_on_one_rank()
    compare("default", FILLED, MEMORY)
    # The rule is followed although the planner may use no memory. The memory is given back once, and reserved again.
    rule = {"gpu_memory_gb": 0, "placement": [{"match": "layers.1.*", "states": "resident"}]}
    compare("larger inputs with a rule", larger, MEMORY, case=replace(CASE, blocks=({**BLOCK, **rule},)))
    compare("no memory afterwards", larger, MEMORY, without_memory_once())
    with mock.patch.object(GpuBudget, "limit", return_value=None):
        compare("no memory afterwards, without a limit", larger, MEMORY, without_memory_once())


SELECTIONS: dict[str, Callable[[], None]] = {
    "demotions": demotions,
    "restorations": restorations,
    **{name: partial(grow, name, growth) for name, growth in (GROWTH | RAMPS).items()},
}

if __name__ == "__main__":
    with software_process_group():
        SELECTIONS[sys.argv[1]]()
