"""Checkpoints are stock's, both ways, whoever reads them and whenever; after a load all is where it was before."""

from __future__ import annotations

import pytest

from tests.launch import run_ranks

JOBS = (
    "save, 1 rank",
    "save, 2 ranks",
    "tags",
    "latest is last",
    "read late",
    "convert",
    "resume",
    "without moments",
    "universal, 1 to 2 ranks",
    "universal, 2 to 1 ranks",
    "universal, 2 to 4 ranks",
    "universal, in part",
)
"""Each is a function of ``scripts/checkpoints.py`` that asserts what it found."""

# One worker of pytest-xdist makes the fixture, once.
pytestmark = pytest.mark.xdist_group("checkpoints")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("checkpoints")
    (finished,) = run_ranks(1, ["-m", "tests.zero.scripts.checkpoints", str(folder)], timeout_s=400)
    assert finished.returncode == 0, finished.output[-4000:]
    return {answer["job"]: answer["found"] for answer in finished.answers()}


@pytest.mark.parametrize("job", JOBS)
def test_as_with_stock(job: str, found: dict[str, str]) -> None:
    assert found.keys() == set(JOBS)
    assert found[job] == ""
