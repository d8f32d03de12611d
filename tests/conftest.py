from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tests.hypothesis_profiles  # noqa: F401
from tests.processor import forget


def buffers() -> set[Path]:
    return set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))


def pytest_sessionstart(session: pytest.Session) -> None:
    session.stash[BEFORE] = buffers()
    if not hasattr(session.config, "workerinput"):
        forget()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """DeepSpeed leaves 66 MB a rank in shared memory when a process ends, also under launchers of its own.

    Only when all tests are done: those of another worker may still need theirs.
    """
    if not hasattr(session.config, "workerinput"):
        for path in buffers() - session.stash[BEFORE]:
            path.unlink(missing_ok=True)


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def other_defaults(request: pytest.FixtureRequest) -> Iterator[None]:
    """Scripts set PyTorch's for themselves. Memory on the device "meta" holds nothing: what came to lie there shows,
    where it meets stock's op by a crash."""
    torch.set_default_dtype(request.param)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


BEFORE = pytest.StashKey[set[Path]]()
