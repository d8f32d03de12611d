"""Let ranks disagree, with and without the agreement that prevents harm; started by ``test_disagreement.py``.

Argument: the name of a disagreement. Every rank prints one answer with the agreement, and one without it. The ranks
compare each collective before they run it: where they call different ones, there is an error, and not a rank that waits
forever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.distributed_c10d import _create_process_group_wrapper

from deep_opt_states.device import cuda
from deep_opt_states.device.kernels.adam import RangeUpdate
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.zero.internals.agreement import StepAgreement, same_on_all_ranks
from deep_opt_states.zero.step import gpu_memory
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, place_all
from tests.kernels.intercepted import before_each_update
from tests.launch import answer
from tests.software_gpu.filled_gpu.growing_inputs import CASE as GROWING
from tests.software_gpu.filled_gpu.growing_inputs import Step, train_on_gpu
from tests.software_gpu.process_group import SoftwareProcessGroup
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import GIB
from tests.zero.parity.training import Record, differences

STEPS = [Step((64,))] * 12
MEMORY_BYTES = GIB // 4
CASE = replace(
    GROWING,
    blocks=({**GROWING.blocks[0], "unit_size": 300_000},),
    widths=(64, *[700] * 5, 64),
    zero={"stage3_prefetch_bucket_size": 3_000_000},
)
"""A case in which forward gathers the next layers ahead, as far as the plan allows."""

TIMEOUT = timedelta(seconds=60)

Find = Callable[[], UpdatePlan]
Describe = Callable[[UpdatePlan], str]
Context = Callable[[], AbstractContextManager[object]]


@contextmanager
def compared_collectives() -> Iterator[None]:
    """Let process groups that are created in this context raise an error where ranks call different collectives."""
    create = SoftwareProcessGroup._gloo

    def comparing(name: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        group = create(name, store, rank, size, TIMEOUT)
        return _create_process_group_wrapper(group, name, store, rank, size, TIMEOUT)

    with mock.patch.object(SoftwareProcessGroup, "_gloo", staticmethod(comparing)):
        yield


def is_last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def other_on_last_rank(find: Find) -> Find:
    """Return ``find`` with another plan on the last rank: there, the CPU updates everything."""

    def found() -> UpdatePlan:
        plan = find()
        if is_last_rank():
            plan = replace(plan, placements=place_all(plan.workload, Placement.CPU), order=None)
        return plan

    return found


def other_plan(agree: Callable[[Find, Describe], UpdatePlan]) -> AbstractContextManager[object]:
    """Return a context in which the last rank finds another plan when a plan is replaced, and the ranks ``agree``."""
    return mock.patch.object(
        gpu_memory, "same_on_all_ranks", lambda find, describe: agree(other_on_last_rank(find), describe)
    )


def short_memory() -> AbstractContextManager[object]:
    """Return a context in which memory is short on the last rank from the 8th step on."""
    calls, observed = 0, cuda.free_and_retries

    def with_retries(*mark: Any) -> tuple[int, int]:
        nonlocal calls
        calls += 1
        free_bytes, retries = observed(*mark)
        return free_bytes, retries + (is_last_rank() and calls > 7)

    return mock.patch.object(cuda, "free_and_retries", with_retries)


def failing_update() -> AbstractContextManager[object]:
    """Return a context in which the third update of the last rank fails."""
    updates = 0

    def fail(update: RangeUpdate) -> None:
        nonlocal updates
        updates += (update.sub_group, update.element_range.begin) == (0, 0)
        if is_last_rank() and updates == 3:
            raise ArithmeticError("an update that fails")

    return before_each_update(fail)


_share = StepAgreement.share


def share_no_short_memory(self: StepAgreement, executor: Executor, *, memory_is_short: bool, refuses: bool) -> bool:
    """Share failures only."""
    _share(self, executor, memory_is_short=False, refuses=refuses)
    return memory_is_short


def share_no_failure(self: StepAgreement, executor: Executor, *, memory_is_short: bool, refuses: bool) -> bool:
    """Share only whether memory is short."""
    failure, executor._failure = executor.failure, None
    short = _share(self, executor, memory_is_short=memory_is_short, refuses=refuses)
    executor._failure = failure
    return short


def sharing(share: Callable[..., bool]) -> AbstractContextManager[object]:
    return mock.patch.object(StepAgreement, "share", share)


@contextmanager
def both(first: AbstractContextManager[object], second: AbstractContextManager[object]) -> Iterator[None]:
    with first, second:
        yield


DISAGREEMENTS: dict[str, tuple[Context, Context]] = {
    "plans": (lambda: other_plan(same_on_all_ranks), lambda: other_plan(lambda find, describe: find())),
    "short memory": (short_memory, lambda: both(short_memory(), sharing(share_no_short_memory))),
    "failures": (failing_update, lambda: both(failing_update(), sharing(share_no_failure))),
}
"""Disagreements by name: the context in which one arises, and the same context without the agreement of the ranks."""


def outcome(stock: Record) -> dict[str, Any]:
    """Train with the plugin, and return the differences from stock, or the error."""
    try:
        ours, seen = train_on_gpu(STEPS, CASE.blocks[0], MEMORY_BYTES, CASE)
    except Exception as error:  # noqa: BLE001 (reported by the test)
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": "", "differences": differences(stock, ours), "placed": seen.placed}


def main(name: str) -> None:
    stock, _ = train_on_gpu(STEPS, None, MEMORY_BYTES, CASE)
    for context in DISAGREEMENTS[name]:
        with context():
            answer(outcome(stock))


if __name__ == "__main__":
    with compared_collectives(), software_process_group():
        main(sys.argv[1])
