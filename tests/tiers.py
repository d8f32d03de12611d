"""What ``make test`` leaves out, and ``make test-all`` runs too: see the README."""

from __future__ import annotations

from typing import Any

import pytest


def thorough(value: Any, *marks: pytest.MarkDecorator) -> Any:
    """A parameter of a test that is one world size, or one way, more than its others show."""
    return pytest.param(value, id=str(value), marks=[pytest.mark.thorough, *marks])
