"""Train until an update has ended in ``step()``, and print what the hooks of the next forward and backward still do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from deep_opt_states.device.cpu import HostStream
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.uninterrupted import Uninterrupted
from deep_opt_states.zero.internals.coordinator import Coordinator
from deep_opt_states.zero.step.gathers import Gathers
from tests.launch import answer
from tests.zero.parity.case import Case
from tests.zero.parity.training import closing_engine
from tests.zero.parity.unit_wait_ranks import CASE, forward
from tests.zero.process_group import process_group

BLOCKS = (
    {"placement": "cpu", "overlap_forward": False, "unit_size": 600},
    # Where the accelerator is the CPU, streamed units are updated when ``step()`` returns.
    {"placement": "streamed", "unit_size": 600},
)
COUNTED = {
    "lookups": (Gathers, "_units_of"),
    "waits": (Executor, "publish"),
    "limits": (Coordinator, "prefetching_until"),
    "events": (HostStream, "record"),
    "sections": (Uninterrupted, "run"),
}
STEPS = 3


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of ``COUNTED`` inside this context."""
    calls: Counter[str] = Counter()
    with ExitStack() as patches:
        for name, (owner, method) in COUNTED.items():
            original = getattr(owner, method)

            def count(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
                calls[name] += 1
                return original(*args, **kwargs)

            patches.enter_context(mock.patch.object(owner, method, count))
        yield calls


def calls_of(case: Case, block: dict[str, Any]) -> dict[str, Counter[str]]:
    """Return what the hooks do in a forward, and in it and its backward."""
    with closing_engine(case, block) as engine:
        for _ in range(STEPS):
            forward(engine, backward=True)
            engine.step()
        with counted() as in_forward:
            forward(engine, backward=False)
        with counted() as in_both:
            forward(engine, backward=True)
    return {"forward": in_forward, "both": in_both}


if __name__ == "__main__":
    with process_group():
        for block in BLOCKS:
            answer(calls_of(CASE, block))
