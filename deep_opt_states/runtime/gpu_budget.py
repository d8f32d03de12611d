"""Decide how much accelerator memory the optimizer may hold, from the memory that training has left free so far."""

from __future__ import annotations

OBSERVED_STEPS = 3
"""The number of steps that are observed before the budget grows.

Allocators, communication and the first long batch take their memory in the first steps.
"""


class GpuBudget:
    """The bytes of this rank's accelerator that a plan may hold: at first ``start_bytes``, then all that is free.

    Of the free memory, ``margin_bytes`` stay free. Memory counts as free if it was in use neither by any process nor by
    PyTorch's cache at the peak of memory use, in backward or in forward. States in such memory make no allocation fail
    that succeeded before. If a later step needs more memory, for a longer sequence, it takes the margin first. When
    half of the margin is taken, memory counts as short, and the budget shrinks. It also shrinks to half of what is held
    when an allocation had to be retried, and to nothing if that happened although nothing was held. The part of the
    budget that is not held yet shrinks with every growth of the need, since no plan has to change for that. The budget
    never grows again.

    ``fills`` is false if the user has set the budget: then it only shrinks.
    """

    def __init__(self, *, start_bytes: int, margin_bytes: int, fills: bool) -> None:
        self.margin_bytes = margin_bytes
        self._fills = fills
        self._allowed_bytes = start_bytes
        self._required_bytes = 0
        self._limit_bytes: int | None = None
        """The most that was possible when memory was short; None if it never was."""
        self._least_free_bytes: int | None = None
        """The least memory that was free at a peak so far, if the optimizer had held nothing."""
        self._steps = 0
        self._alloc_retries = 0

    @property
    def bytes(self) -> int:
        """Return the budget for the next plan."""
        return self._allowed_bytes if self._limit_bytes is None else min(self._allowed_bytes, self._limit_bytes)

    def require(self, required_bytes: int) -> None:
        """Allow at least ``required_bytes``, for units that rules place on the accelerator, until memory is short."""
        self._required_bytes = required_bytes
        self._allowed_bytes = max(self._allowed_bytes, required_bytes)

    def observe(self, free_bytes: int, alloc_retries: int, held_bytes: int, *, is_evicted: bool = False) -> None:
        """Update the budget from the peak of the last step. Call this once per step.

        ``free_bytes`` is the memory that was free at the peak since the optimizer has held ``held_bytes``.
        ``alloc_retries`` is how often PyTorch has had to empty its cache, since the process started, to satisfy an
        allocation. ``is_evicted``: the optimizer has given the ``held_bytes`` to training, and ``free_bytes`` are of a
        peak since then.
        """
        self._steps += 1
        free_without_states_bytes = free_bytes if is_evicted else free_bytes + held_bytes
        if self._least_free_bytes is None or free_without_states_bytes < self._least_free_bytes:
            self._least_free_bytes = free_without_states_bytes
        self.count_retries(alloc_retries, 0 if is_evicted else held_bytes)
        if self._steps < OBSERVED_STEPS:
            return
        free_for_states = self._least_free_bytes - self.margin_bytes
        if self._steps == OBSERVED_STEPS and self._fills:
            self._allowed_bytes = max(self._required_bytes, free_for_states)
        elif self._least_free_bytes - self.margin_bytes // 2 < held_bytes:
            self.limit(free_for_states)
        else:
            self._follow_need(held_bytes, free_for_states)

    def _follow_need(self, held_bytes: int, free_for_states: int) -> None:
        """Allow no more than is free, beyond what is held already or required."""
        self._allowed_bytes = min(self._allowed_bytes, max(self._required_bytes, held_bytes, free_for_states))

    def count_retries(self, alloc_retries: int, held_bytes: int) -> None:
        """Limit the budget to half of ``held_bytes``, held since the last call, if an allocation was retried."""
        is_short = alloc_retries > self._alloc_retries
        self._alloc_retries = alloc_retries
        if is_short and self._steps >= OBSERVED_STEPS:
            # Memory was short, for any reason. Training can do without these states on the accelerator.
            self.limit(held_bytes // 2)

    def is_short_with(self, free_bytes: int) -> bool:
        """Return whether memory will count as short after this step, given that ``free_bytes`` are free now."""
        return self._steps >= OBSERVED_STEPS - 1 and free_bytes < self.margin_bytes // 2

    def ignore_retries(self, count: int) -> None:
        """Do not count ``count`` retries, which are those of allocations for the optimizer and not for training."""
        self._alloc_retries += count

    def limit(self, limit_bytes: int) -> None:
        """Allow no more than ``limit_bytes`` from now on, because memory was short."""
        limit_bytes = max(0, limit_bytes)
        self._limit_bytes = limit_bytes if self._limit_bytes is None else min(self._limit_bytes, limit_bytes)
