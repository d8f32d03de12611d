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


CODES = {
    "ends": [0, 0],
    "raises": [1, 1, 1],
    "fails": [0],
    # The other finds that it is alone, in a collective.
    "leaves": [1, 1],
    "stuck": [1],
    "killed": [-15, -15],
    "asked": [143, 143],
}
"""Of the ranks of all runs that end in this way."""


@pytest.mark.parametrize("way", CODES)
def test_the_process_ends_as_without_the_plugin(way: str, endings: list[dict[str, Any]]) -> None:
    mine = [ending for ending in endings if ending["way"] == way]
    assert len(mine) == len(CODES[way])
    for ending, code in zip(mine, CODES[way], strict=True):
        assert ending["seconds"] is not None, f"made no step\n{ending['output'][-4000:]}"
        # A rank that was asked to exit may first find that the other one has.
        codes = (code, 1) if way == "asked" else (code,)
        assert ending["code"] in codes or ABORTED in ending["output"], ending["output"][-4000:]
        # A process that waits for an update that never ends gives up after two waits of 4 s.
        assert ending["seconds"] < (20 if way == "stuck" else 10)
        own = way in ("raises", "stuck") or (way == "leaves" and ending["rank"] == 0)
        assert ("the user's own" in ending["output"]) == own
        assert ending["output"].count(f"[deep_opt_states] {SAID}") == (way == "fails")
