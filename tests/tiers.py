"""Mark the parameters that ``make test`` omits and ``make test-all`` runs, and register the profiles of Hypothesis.

``make test`` has the profile ``quick``, with a fourth of the examples of ``make test-all``, new ones in each run. No
profile has a deadline: it would assert a duration, on shared machines.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=25)
# Without a database, a seed repeats a failure on any machine.
settings.register_profile("stress", deadline=None, max_examples=500, database=None)
settings.load_profile("untimed")


def thorough(value: Any, *marks: pytest.MarkDecorator) -> Any:
    """Return a test parameter that only ``make test-all`` runs: another world size, or another way to the same code."""
    return pytest.param(value, id=str(value), marks=[pytest.mark.thorough, *marks])
