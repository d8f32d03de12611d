"""Mark the test parameters that ``make test`` omits and ``make test-all`` runs: see docs/dev/testing.md."""

from __future__ import annotations

from typing import Any

import pytest


def thorough(value: Any, *marks: pytest.MarkDecorator) -> Any:
    """Return a test parameter that only ``make test-all`` runs: another world size, or another way to the same code."""
    return pytest.param(value, id=str(value), marks=[pytest.mark.thorough, *marks])
