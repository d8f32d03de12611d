"""Count the master weights that are split, so that a test notices if none are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from deep_opt_states.names import CONFIG_KEY
from deep_opt_states.runtime.split_masters import SplitRange
from deep_opt_states.zero.internals.compat import config_of, param_dict
from tests.zero.parity.case import SPLITS_EVERYWHERE, Case

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


@contextmanager
def splits_masters_in(case: Case, engine: Any) -> Iterator[None]:
    """Fail if ``engine`` trains ``case`` inside this context, and splits no masters although every case must."""
    with counted_splits() as splits:
        yield
    assert splits or not must_split(case, engine), f"{case.name}: no masters were split"


def must_split(case: Case, engine: Any) -> bool:
    """Return whether ``SPLITS_EVERYWHERE`` concerns the engine of ``case``.

    It does not concern stock, nor a block that keeps masters whole, nor an engine that has persistent parameters only.
    The block need not have the key: it may lack it by mistake.
    """
    if not (SPLITS_EVERYWHERE and case.can_split_masters and hasattr(engine.optimizer, "plan")):
        return False
    block = param_dict(config_of(engine))[CONFIG_KEY]
    has_others = any(split.rest for split in engine.optimizer._running.executor._splits)
    return has_others and block.get("split_masters") is not False
