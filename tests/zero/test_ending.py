"""A script may end, or fail, right after ``step()``: nothing hangs, and a failed update is told."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks

ABORTED = "terminate called without an active exception"
"""By PyTorch and Gloo, now and then, in the interpreter's shutdown; also with stock DeepSpeed."""

SAID = "The optimizer update stopped half way (ValueError: out of luck)"

# One worker of pytest-xdist makes the fixture, once.
pytestmark = pytest.mark.xdist_group("ending")


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ending")
    (finished,) = run_ranks(1, ["-m", "tests.zero.scripts.ending", str(folder)], timeout_s=120)
    assert finished.returncode == 0, finished.output[-4000:]
    return finished.answers()


@pytest.mark.parametrize(("way", "ranks", "code"), [("ends", 2, 0), ("raises", 3, 1), ("fails", 1, 0)])
def test_the_process_ends_as_without_the_plugin(way: str, ranks: int, code: int, endings: list[dict[str, Any]]) -> None:
    mine = [ending for ending in endings if ending["way"] == way]
    assert len(mine) == ranks
    for ending in mine:
        assert ending["seconds"] is not None, f"made no step\n{ending['output'][-4000:]}"
        assert ending["code"] == code or ABORTED in ending["output"], ending["output"][-4000:]
        assert ending["seconds"] < 20
        assert ("the user's own" in ending["output"]) == (way == "raises")
        assert ending["output"].count(f"[deep_opt_states] {SAID}") == (way == "fails")
