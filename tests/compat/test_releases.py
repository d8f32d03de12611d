"""Check the results of ``make compat``, and that the oldest release has the bits of stock in a few golden cases.

The newest release is the one that all other tests run with.
"""

from __future__ import annotations

import json

import deepspeed
import pytest

from deep_opt_states.zero.internals.releases import TRIED_DEEPSPEED, has
from tests.compat.__main__ import RESULTS, try_release
from tests.compat.golden import EQUAL, EQUAL_BUT_NAN, GOLDEN, NORM_IS_CHECKED_SINCE, QUICK, SINCE, refused
from tests.zero.parity.cases import CASES

RELEASES = json.loads(RESULTS.read_text(encoding="utf-8"))["releases"]


def test_the_golden_cases_are_parity_cases() -> None:
    assert {case.name for case in CASES} >= set(GOLDEN) >= set(QUICK)


def test_the_plugin_names_the_releases_that_were_tried() -> None:
    assert tuple(RELEASES) == TRIED_DEEPSPEED
    assert deepspeed.__version__.split("+")[0] == TRIED_DEEPSPEED[-1]


@pytest.mark.parametrize("release", TRIED_DEEPSPEED)
def test_every_golden_case_is_equal_or_refused(release: str) -> None:
    for name in GOLDEN:
        expected = EQUAL
        if not has(release, since := SINCE.get(name, "0")):
            expected = refused(since)
        elif not has(release, NORM_IS_CHECKED_SINCE.get(name, "0")):
            expected = EQUAL_BUT_NAN
        assert RELEASES[release][name] == expected, name


# Thorough, because the op of that release is compiled first.
@pytest.mark.thorough
@pytest.mark.promise("P1")
def test_the_oldest_release_has_the_bits_of_stock() -> None:
    assert try_release(TRIED_DEEPSPEED[0], QUICK) == dict.fromkeys(QUICK, EQUAL)
