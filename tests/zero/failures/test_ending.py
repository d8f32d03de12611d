"""Check that a script may end, or fail, right after ``step()``: nothing hangs, and a failed update is logged."""

from __future__ import annotations

import pytest

from tests.zero.failures.ending_ranks import PHASES
from tests.zero.training_once import ProgramRanks, TrainingOnce, on_one_worker

ABORTED = "terminate called without an active exception"
"""PyTorch and Gloo sometimes abort with this message in the interpreter's shutdown, also with stock DeepSpeed."""

LOGGED = "The optimizer update was not applied as a whole (ValueError: injected failure)"

RANKS = ProgramRanks("tests.zero.failures.ending_ranks", timeout_s=120, arguments=lambda folder: [str(folder)])
pytestmark = on_one_worker(RANKS.program)


CODES = {
    "ends": [0, 0],
    "raises": [1, 1, 1],
    "update fails": [0],
    # Rank 1 fails in a collective, because rank 0 has ended.
    "rank 0 raises": [1, 1],
    "update hangs": [1],
    "destroys the group": [0, 0],
    "SIGTERM": [-15, -15],
    "SIGTERM with a handler": [143, 143],
    **{f"SIGTERM in {phase}": [143, 143] for phase in PHASES},
}
"""The exit codes of the ranks of all runs, by the way in which they end."""


@pytest.mark.parametrize("way", CODES)
@pytest.mark.promise("P6")
def test_the_process_ends_as_without_the_plugin(way: str, trained: TrainingOnce) -> None:
    (endings,) = trained.answers(1)
    for ending, code in zip([ending for ending in endings if ending["way"] == way], CODES[way], strict=True):
        assert ending["has stepped"], f"made no step\n{ending['output'][-4000:]}"
        # Before a rank handles SIGTERM, a collective may fail because the other rank has exited.
        codes = (code, 1) if way.startswith("SIGTERM ") else (code,)
        assert ending["code"] in codes or ABORTED in ending["output"], ending["output"][-4000:]
        raises = way in ("raises", "update hangs") or (way == "rank 0 raises" and ending["rank"] == 0)
        assert ("the user's exception" in ending["output"]) == raises
        if way == "destroys the group":
            assert ending["output"].count("memory of rank 0:") == (ending["rank"] == 0), ending["output"][-4000:]
        assert ending["output"].count(f"[deep_opt_states] ERROR: {LOGGED}") == (way == "update fails")
    if way.startswith("SIGTERM in"):
        assert 143 in [ending["code"] for ending in endings if ending["way"] == way]
        assert (trained.folder(1) / f"saved {way}" / "latest").read_text() == "global_step1"
