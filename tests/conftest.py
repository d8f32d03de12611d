"""Mark and order the tests, remove shared memory and the processor cache, and provide common fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tests.tiers  # noqa: F401
from tests import PROCESSOR_FILE
from tests.launch import REPOSITORY, open_shared_buffers, shared_buffers

SLOWEST_FIRST = (
    "tests/software_gpu/races",
    "tests/zero/parity/test_parity.py",
    "tests/zero/parity/test_compositions.py",
    "tests/zero/behaviour",
    "tests/software_gpu/filled_gpu",
    "tests/software_gpu/training",
    "tests/frameworks",
    "tests/zero/races",
    "tests/zero",
)
"""Folders and files of the longest tests. If such a test ran last, the other workers of pytest-xdist would be idle."""

GPU_FOLDER = REPOSITORY / "tests" / "gpu"
BUFFERS_BEFORE = pytest.StashKey[set[Path]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if GPU_FOLDER in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="no CUDA device: run make gpu-check on a machine with one"))
    places = [str(REPOSITORY / place) for place in SLOWEST_FIRST]
    items.sort(key=lambda item: [not str(item.path).startswith(place) for place in places])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print failures of tests/gpu immediately: a part of ``gpu-check`` that is killed never reaches the summary."""
    if report.failed and report.nodeid.startswith("tests/gpu/"):
        print(f"\n----- at once: {report.nodeid}\n{report.longreprtext}", flush=True)


def pytest_sessionstart(session: pytest.Session) -> None:
    session.stash[BUFFERS_BEFORE] = shared_buffers()
    if not hasattr(session.config, "workerinput"):
        PROCESSOR_FILE.unlink(missing_ok=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remove the 66 MB per rank that DeepSpeed leaves in shared memory, except for ranks that still run."""
    if not hasattr(session.config, "workerinput"):
        for path in shared_buffers() - session.stash[BUFFERS_BEFORE] - open_shared_buffers():
            path.unlink(missing_ok=True)


@pytest.fixture
def other_defaults() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)
