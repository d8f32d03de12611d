"""Check the results of ``make compat``, ``release-check`` and ``test-frameworks``, and cases of the oldest release."""

from __future__ import annotations

from pathlib import Path

import deepspeed
import pytest
import torch

from deep_opt_states.names import __version__
from deep_opt_states.zero.internals.releases import TESTED_DEEPSPEED, is_at_least
from tests.compat.__main__ import Release, try_release
from tests.compat.frameworks.__main__ import EQUAL as EQUAL_TENSORS
from tests.compat.frameworks.cases import FRAMEWORKS, Framework
from tests.compat.frameworks.same_bits import differences, saved
from tests.compat.golden import EQUAL, EQUAL_BUT_NAN, GOLDEN, NORM_IS_CHECKED_SINCE, QUICK, SINCE, TRIED_TORCH, refused
from tests.compat.results import read_results
from tests.zero.parity.cases import CASES

TRIED = read_results()


def test_the_results_are_of_this_version_its_golden_cases_and_the_named_releases() -> None:
    assert {case.name for case in CASES} >= set(GOLDEN) >= set(QUICK)
    assert tuple(TRIED["deepspeed"]) == TESTED_DEEPSPEED
    assert deepspeed.__version__.split("+")[0] == TESTED_DEEPSPEED[-1]
    for package, target in (("deepspeed", "compat"), ("torch", "compat"), ("python", "release-check")):
        assert {entry["deep_opt_states"] for entry in TRIED[package].values()} == {__version__}, f"run make {target}"


@pytest.mark.P1
@pytest.mark.parametrize("release", TESTED_DEEPSPEED)
def test_every_golden_case_is_equal_or_refused_with_each_release_of_deepspeed(release: str) -> None:
    assert TRIED["deepspeed"][release]["missing_names"] == []
    for name in GOLDEN:
        expected = EQUAL
        if not is_at_least(release, since := SINCE.get(name, "0")):
            expected = refused(since)
        elif not is_at_least(release, NORM_IS_CHECKED_SINCE.get(name, "0")):
            expected = EQUAL_BUT_NAN
        assert TRIED["deepspeed"][release]["cases"][name] == expected, name


def test_every_golden_case_is_equal_with_each_release_of_pytorch_and_distributions_with_each_python() -> None:
    for release in TRIED_TORCH:
        assert TRIED["torch"][release]["deepspeed"] == TESTED_DEEPSPEED[-1]
        assert TRIED["torch"][release]["cases"] == dict.fromkeys(GOLDEN, EQUAL), release
    assert [version for version, found in TRIED["python"].items() if found["differences"]] == []


@pytest.mark.P1
@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)
def test_every_run_of_a_framework_saved_bytes_identical_to_stock(framework: Framework) -> None:
    found = TRIED["frameworks"][framework.name]
    assert found["requirement"] == framework.requirement, "run make test-frameworks"
    resumed = {f"{run.name}, resumed" for run in framework.runs if run.resume}
    assert set(found["runs"]) == {run.name for run in framework.runs} | resumed
    for name, result in found["runs"].items():
        assert result.endswith(EQUAL_TENSORS), name


def test_every_tensor_in_nested_containers_is_compared_by_its_bits(tmp_path: Path) -> None:
    stock = {"zero": [torch.tensor([0.0])], "nan": torch.tensor([torch.nan]), "more": (torch.ones(1),)}
    ours = {"zero": [torch.tensor([-0.0])], "nan": torch.tensor([torch.nan])}
    for name, content in (("stock", stock), ("ours", ours)):
        (tmp_path / name).mkdir()
        torch.save(content, tmp_path / name / "state.pt")
    found = differences(saved(tmp_path / "stock"), saved(tmp_path / "ours"))
    assert found == ["state.pt[more][0] was saved by one of the two only", "state.pt[zero][0] differs"]


# Thorough, because the op of that release is compiled first.
@pytest.mark.thorough
@pytest.mark.P1
def test_the_oldest_release_is_bit_identical_to_stock() -> None:
    found = try_release(Release("deepspeed", TESTED_DEEPSPEED[0]), QUICK)
    assert found["missing_names"] == []
    assert found["cases"] == dict.fromkeys(QUICK, EQUAL)
