from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.hypothesis_profiles  # noqa: F401


@pytest.fixture(autouse=True, scope="session")
def _leave_no_shared_memory() -> Iterator[None]:
    """DeepSpeed leaves 66 MB a rank in shared memory when a process ends, also under launchers of its own."""

    def buffers() -> set[Path]:
        return set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))

    before = buffers()
    yield
    for path in buffers() - before:
        path.unlink()
