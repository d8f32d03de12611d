"""How many slots the accelerator has room for beyond the plan's, by what training has left free so far."""

from __future__ import annotations

OBSERVED_STEPS = 3
"""Before any is added: allocators, communication and the first long batch take their memory in the first steps."""


class Headroom:
    """``most`` slots of ``slot_bytes`` each can be used; ``margin_bytes`` stay free.

    Free is what neither anybody nor PyTorch's cache had when they had most, in backward or in forward: a slot that
    takes it makes no allocation fail that did not before. What training needs in a later step, for a longer sequence,
    it takes from the margin first, and then from our slots. They go to PyTorch's cache, and are not taken again.
    """

    def __init__(self, *, slot_bytes: int, margin_bytes: int, most: int) -> None:
        self._slot_bytes = slot_bytes
        self._margin_bytes = margin_bytes
        self._most = most
        self._least_free_bytes: int | None = None
        self._steps = 0
        self._alloc_retries = 0
        self._most_held = 0
        self.slots = 0
        """To be held beyond the plan's from the next step on."""

    def observe(self, free_bytes: int, alloc_retries: int) -> None:
        """Once a step: what was free at the peak, beside the slots held then, and how often PyTorch has ever had to
        give its cache back to satisfy an allocation."""
        self._steps += 1
        self._most_held = max(self._most_held, self.slots)
        # What was given back has stayed in the cache, and so in the peak.
        without_ours = free_bytes + self._most_held * self._slot_bytes
        least = without_ours if self._least_free_bytes is None else min(self._least_free_bytes, without_ours)
        self._least_free_bytes = least
        if self._steps <= OBSERVED_STEPS:
            self._alloc_retries = alloc_retries
            return
        if alloc_retries > self._alloc_retries:
            # Whatever the reason, half of ours is the first thing that training can do without.
            self._alloc_retries = alloc_retries
            self._most = self.slots // 2
        self.slots = max(0, min(self._most, (least - self._margin_bytes) // self._slot_bytes))

    def refused(self) -> None:
        """There was no room after all: never again."""
        self._most = self.slots = 0
