"""Decide how many slots to add to those of the plan, from the accelerator memory that training has left free so far."""

from __future__ import annotations

OBSERVED_STEPS = 3
"""The number of steps that are observed before a slot is added.

Allocators, communication and the first long batch take their memory in the first steps.
"""


class Headroom:
    """The number of slots that can be held in addition to the plan's: at most ``max_slots``, of ``slot_bytes`` each.

    Of the free memory, ``margin_bytes`` stay free. Memory counts as free if it was in use neither by any process nor by
    PyTorch's cache at the peak of memory use, in backward or in forward. A slot in such memory makes no allocation fail
    that succeeded before. If a later step needs more memory, for a longer sequence, it takes the margin first. After
    that, slots are freed: their memory goes to PyTorch's cache and is not taken again.
    """

    def __init__(self, *, slot_bytes: int, margin_bytes: int, max_slots: int) -> None:
        self._slot_bytes = slot_bytes
        self._margin_bytes = margin_bytes
        self._max_slots = max_slots
        self._least_free_bytes: int | None = None
        self._steps = 0
        self._alloc_retries = 0
        self._max_held = 0
        self.slots = 0
        """The number of slots to hold in addition to the plan's from the next step on."""

    def observe(self, free_bytes: int, alloc_retries: int) -> None:
        """Update ``slots`` from the peak of the last step. Call this once per step.

        ``free_bytes`` is the memory that was free at the peak, not counting the slots held then. ``alloc_retries`` is
        how often PyTorch has had to empty its cache, since the process started, to satisfy an allocation.
        """
        self._steps += 1
        self._max_held = max(self._max_held, self.slots)
        # Slots that were freed have stayed in PyTorch's cache, and so they count in the peak.
        without_ours = free_bytes + self._max_held * self._slot_bytes
        least = without_ours if self._least_free_bytes is None else min(self._least_free_bytes, without_ours)
        self._least_free_bytes = least
        if self._steps <= OBSERVED_STEPS:
            self._alloc_retries = alloc_retries
            return
        if alloc_retries > self._alloc_retries:
            # Memory was short, for any reason. Training does not need the added slots, so give up half of them.
            self._alloc_retries = alloc_retries
            self._max_slots = self.slots // 2
        self.slots = max(0, min(self._max_slots, (least - self._margin_bytes) // self._slot_bytes))

    def add_no_more(self) -> None:
        """Hold no additional slots from now on, since an allocation of one has failed."""
        self._max_slots = self.slots = 0
