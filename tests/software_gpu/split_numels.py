"""Count the master weights that are split, so that a test notices if none are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from deep_opt_states.runtime.split_masters import SplitRange

ACCELERATOR, CPU = "accelerator", "cpu"


@contextmanager
def counted_splits() -> Iterator[Counter[str]]:
    """Yield the number of masters that were split inside this context, by the processor that updates them."""
    numels: Counter[str] = Counter()
    split = SplitRange.split

    def counted_split(self: SplitRange) -> None:
        split(self)
        numels[ACCELERATOR if self.sums else CPU] += self.elements.numel

    with mock.patch.object(SplitRange, "split", counted_split):
        yield numels
