"""Skip the tests of this folder on machines without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip all tests of this folder without a GPU. The hook receives every test of the session."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device: run make gpu-check on a machine with one")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(skip)
