"""Check the results of ``make compat``, and that the oldest release has the bits of stock in a few golden cases.

The newest release is the one that all other tests run with.
"""

from __future__ import annotations

import deepspeed
import pytest

from deep_opt_states.names import __version__
from deep_opt_states.zero.internals.releases import TESTED_DEEPSPEED, is_at_least
from tests.compat.__main__ import main, try_release
from tests.compat.environments import Release
from tests.compat.golden import (
    EQUAL,
    EQUAL_BUT_NAN,
    GOLDEN,
    NORM_IS_CHECKED_SINCE,
    QUICK,
    SINCE,
    TRIED_TORCH,
    refused,
)
from tests.compat.results import read_results
from tests.metadata import changelog, python_versions
from tests.zero.parity.cases import CASES

TRIED = read_results()


def test_the_golden_cases_are_parity_cases() -> None:
    assert {case.name for case in CASES} >= set(GOLDEN) >= set(QUICK)


def test_the_plugin_names_the_releases_that_were_tried() -> None:
    assert tuple(TRIED["deepspeed"]) == TESTED_DEEPSPEED
    assert deepspeed.__version__.split("+")[0] == TESTED_DEEPSPEED[-1]


@pytest.mark.parametrize(
    ("package", "target"), [("deepspeed", "compat"), ("torch", "compat"), ("python", "release-check")]
)
def test_every_result_is_of_this_version_of_the_plugin(package: str, target: str) -> None:
    assert {entry["deep_opt_states"] for entry in TRIED[package].values()} == {__version__}, f"run make {target}"


@pytest.mark.parametrize("release", TESTED_DEEPSPEED)
def test_no_tried_release_of_deepspeed_lacks_a_name_that_the_plugin_uses(release: str) -> None:
    assert TRIED["deepspeed"][release]["missing_names"] == []


@pytest.mark.parametrize("release", TESTED_DEEPSPEED)
def test_every_golden_case_is_equal_or_refused_with_each_release_of_deepspeed(release: str) -> None:
    for name in GOLDEN:
        expected = EQUAL
        if not is_at_least(release, since := SINCE.get(name, "0")):
            expected = refused(since)
        elif not is_at_least(release, NORM_IS_CHECKED_SINCE.get(name, "0")):
            expected = EQUAL_BUT_NAN
        assert TRIED["deepspeed"][release]["cases"][name] == expected, name


@pytest.mark.parametrize("release", TRIED_TORCH)
def test_every_golden_case_is_equal_with_each_release_of_pytorch(release: str) -> None:
    assert TRIED["torch"][release]["deepspeed"] == TESTED_DEEPSPEED[-1]
    assert TRIED["torch"][release]["cases"] == dict.fromkeys(GOLDEN, EQUAL)


@pytest.mark.parametrize("version", TRIED["python"])
def test_the_installed_distributions_have_the_bits_of_stock_with_each_python(version: str) -> None:
    assert TRIED["python"][version]["differences"] == []


def test_every_python_of_the_metadata_was_tried_at_a_release() -> None:
    named = set(python_versions())
    tried = {version.rpartition(".")[0] for version in TRIED["python"]}
    # Between two releases, the distributions of the next one cannot have been tried with all interpreters yet.
    is_release = next(iter(changelog().values())) == ""
    assert tried == named if is_release else tried <= named, "run make release-check"


@pytest.mark.parametrize("argument", ["2.14.1", "torch", "torch==", "numpy==2.0"])
def test_an_argument_that_names_no_release_is_refused(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([argument])
    assert f"must be deepspeed==VERSION or torch==VERSION, found '{argument}'" in capsys.readouterr().err


# Thorough, because the op of that release is compiled first.
@pytest.mark.thorough
@pytest.mark.promise("P1")
def test_the_oldest_release_has_the_bits_of_stock() -> None:
    found = try_release(Release("deepspeed", TESTED_DEEPSPEED[0]), QUICK)
    assert found["missing_names"] == []
    assert found["cases"] == dict.fromkeys(QUICK, EQUAL)
