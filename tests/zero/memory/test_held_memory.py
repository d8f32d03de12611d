"""Check that a failed allocation is logged at the end of an engine, which is not kept in memory for that."""

from __future__ import annotations

import gc
import weakref
from contextlib import ExitStack
from unittest import mock

from deep_opt_states.runtime.gpu_budget import GpuBudget
from deep_opt_states.zero.step import held_memory
from deep_opt_states.zero.step.held_memory import HeldMemory


def holding_memory(resources: ExitStack) -> HeldMemory:
    """Return memory that logs a failure when ``resources`` is closed."""
    budget = GpuBudget(start_bytes=0, margin_bytes=0, fills=True)
    with mock.patch.object(held_memory, "failed_allocations", return_value=0):
        memory = HeldMemory(budget, 1000, lambda: False, lambda: True)
    memory.log_failure_at_exit(resources)
    return memory


def test_a_failed_allocation_is_logged_without_a_process_group() -> None:
    with (
        mock.patch.object(held_memory, "failed_allocations", return_value=1),
        mock.patch("deep_opt_states.zero.internals.log.log_dist") as log,
        ExitStack() as resources,
    ):
        holding_memory(resources)
    assert "an allocation has failed while optimizer states hold" in log.call_args.args[0]


def test_the_callback_at_exit_does_not_keep_the_memory() -> None:
    resources = ExitStack()
    memory = weakref.ref(holding_memory(resources))
    del resources
    gc.collect()
    assert memory() is None
