"""Watch the accelerator memory that the optimizer holds on one rank: does training need it back?"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from deep_opt_states.device.cuda import (
    AllocatorMark,
    allocated_bytes,
    empty_cache,
    failed_allocations,
    free_and_retries,
    free_bytes,
    mark_emptied_allocator,
    reserved_bytes,
)
from deep_opt_states.runtime.gpu_budget import GpuBudget
from deep_opt_states.zero.internals.log import log_this_rank
from perf_model.units import gigabytes

REMEDY = (
    "If stock DeepSpeed has enough memory for this step, its need has grown at once by more than the margin, without a "
    "larger input: a larger gpu_memory_margin_gb leaves more memory free"
)


class HeldMemory:
    """The ``bytes`` of accelerator memory that a plan may give back, and the signs that training needs them.

    ``is_given_back`` returns whether training has the memory at present. ``holds_memory`` returns whether the plan has
    any.
    """

    def __init__(
        self,
        budget: GpuBudget,
        held_bytes: int,
        is_given_back: Callable[[], bool],
        holds_memory: Callable[[], bool],
    ) -> None:
        self.budget = budget
        self.bytes = held_bytes
        self.need_is_known = False
        """Whether a forward and its backward have shown, since the memory was given back, how much training needs."""
        self._is_given_back = is_given_back
        self._holds_memory = holds_memory
        self._changed: AllocatorMark | None = None
        """When this rank last took or gave back memory for a plan; None if it never did."""
        self._taken_bytes = 0
        """The bytes that this rank has allocated for plans since the start, less those that it has freed."""
        self._failed = failed_allocations()
        """The allocations that have failed so far, without those for a plan since the last forward."""
        self._available_bytes: int | None = None
        """The memory that PyTorch held or could take when a forward began; None if the plan held no memory then."""

    @property
    def exceeds_budget(self) -> bool:
        """Return whether the plan holds more than the budget allows."""
        return self.budget.bytes < self.bytes

    def bytes_in_use(self) -> int:
        """Return the accelerator memory that tensors of training use now on this rank, without that of the plan.

        The memory that the first plan took is counted, too. It does not matter: only the growth does.
        """
        return allocated_bytes() - self._taken_bytes

    def observe(self) -> None:
        """Update the budget from the peak of memory use so far. Call this after backward, before the update."""
        free, retries = free_and_retries(self._changed)
        self.budget.observe(free, retries, self.bytes, is_evicted=self._is_given_back())
        self.need_is_known = True

    @property
    def has_failed(self) -> bool:
        """Return whether an allocation has failed since the last forward while the plan holds memory."""
        return self._holds_memory() and failed_allocations() > self._failed

    def begin_forward(self) -> None:
        """Remember what is free before a forward, so that ``is_short_now`` is fast."""
        self._failed = failed_allocations()
        self._available_bytes = free_bytes() + reserved_bytes() if self._holds_memory() else None

    def is_short_now(self) -> bool:
        """Return whether the present forward has taken so much of the margin that the budget will shrink.

        Other processes may have taken more since it began; that does not count. A plan that exceeds the budget already
        is kept for rules by name.
        """
        return (
            self._available_bytes is not None
            and self.budget.is_short_with(self._available_bytes - reserved_bytes())
            and not self.exceeds_budget
        )

    def log_failure(self) -> None:
        """Log the remedy if training ends with an allocation that has failed while the plan holds memory."""
        if self.has_failed:
            log_this_rank(
                f"an allocation has failed while optimizer states hold {gigabytes(self.bytes)} of GPU memory. {REMEDY}"
            )

    def log_failure_at_exit(self, resources: ExitStack) -> None:
        """Call ``log_failure`` when ``resources`` is closed, or when the process ends before that.

        A script that does not catch the error may end without destroying its engine. An engine that is collected is not
        kept for that: the callback at exit does not refer to this object.
        """
        at_exit = partial(_log_failure_if_alive, weakref.ref(self))
        atexit.register(at_exit)
        resources.callback(atexit.unregister, at_exit)
        resources.callback(self.log_failure)

    def count_retries(self) -> None:
        """Count the retries so far, which happened while the memory was held. Call this before it is given back."""
        self.budget.count_retries(free_and_retries()[1], self.bytes)

    def gave_back(self) -> None:
        """Note that training has the memory until the next forward and backward have shown its need."""
        self._available_bytes = None
        self.need_is_known = False

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Count what is allocated for the plan in this context, and measure peaks anew afterwards.

        PyTorch's cache is emptied before and after. States that were reserved inside cached blocks of training would
        split them, and training would need new memory in their place. Memory that the plan gives back would hide in the
        cache, and the next peak would not show what training needs.
        """
        empty_cache()
        before, (_, retries), failed = allocated_bytes(), free_and_retries(), failed_allocations()
        yield
        self._taken_bytes += allocated_bytes() - before
        self._changed = mark_emptied_allocator()
        self.budget.ignore_retries(free_and_retries()[1] - retries)
        self._failed += failed_allocations() - failed


def _log_failure_if_alive(reference: weakref.ref[HeldMemory]) -> None:
    memory = reference()
    if memory is not None:
        memory.log_failure()
