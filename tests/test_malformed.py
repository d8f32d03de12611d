"""Check that malformed blocks and profiles are refused or used, and that a problem is reported."""

from __future__ import annotations

import pytest

from tests import malformed
from tests.zero.start.malformed_ranks import problems_of


@pytest.mark.promise("P6")
def test_engines_with_malformed_blocks_and_profiles_are_refused_and_training_goes_on() -> None:
    found = malformed.configs(20, seed=1)
    assert found.problems == ()
    assert found.tried >= 10
    assert found.refused > found.tried / 2


@pytest.mark.parametrize(
    "error", [KeyError("placement"), ValueError("placement: must be a word, found 3.\nWrite a word.")]
)
def test_an_error_of_another_type_is_a_problem(error: Exception) -> None:
    assert "the error is not ours" in problems_of(error)[0]
