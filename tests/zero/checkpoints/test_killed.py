"""Check that a killed run loses only the steps after its last checkpoint. ``tests/kills.py`` kills more runs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.launch import run_ranks
from tests.ranks import on_ranks
from tests.zero.checkpoints.killed_ranks import hung_in_init_distributed, last_complete
from tests.zero.rank_group import Group

HANG_S = 5


def fail() -> None:
    raise RuntimeError("this work fails")


KILLS, SEED = 4, 1
"""One kill in a save, in a load, in a move of units and in an update."""


@pytest.mark.promise("P1", "P4")
@pytest.mark.parametrize(
    "training",
    [
        "data parallel",
        pytest.param("AutoTP", marks=pytest.mark.thorough),
        pytest.param("decoupled", marks=pytest.mark.thorough),
    ],
)
def test_a_killed_run_resumes_from_its_last_checkpoint_with_the_bits_of_stock(training: str, tmp_path: Path) -> None:
    """Check it on two ranks, with a decoupled writer beside each of them, and beside tensor parallelism on four."""
    script = ["-m", "tests.zero.checkpoints.killed_ranks", str(tmp_path), str(SEED), str(KILLS), training]
    (finished,) = run_ranks(1, script, timeout_s=900)
    assert finished.returncode == 0, finished.output[-4000:]
    kills = finished.answers()
    assert [kill["phase"] for kill in kills] == ["save", "load", "promotion", "update"]
    for kill in kills:
        # A rank that outlives the other for a moment may fail in a collective.
        assert -9 in kill["codes"], kill
        assert set(kill["codes"]) <= {-9, 1}, kill
        assert kill["problem"] == "", kill


@pytest.mark.parametrize(
    ("latest", "resumed"),
    [("global_step1", "global_step1"), ("global_step3", "global_step2"), ("", "global_step2")],
    ids=["complete", "a rank's file is missing", "empty"],
)
def test_a_run_resumes_from_the_newest_complete_checkpoint(latest: str, resumed: str, tmp_path: Path) -> None:
    for root, steps, ranks in (("stock", 3, 2), ("saved", 2, 2), ("saved", 3, 1)):
        for step in range(1, steps + 1):
            folder = tmp_path / root / f"global_step{step}"
            folder.mkdir(parents=True, exist_ok=True)
            for rank in range(ranks):
                torch.save(step, folder / f"rank {rank}.pt")
    assert last_complete(tmp_path / "saved", latest, tmp_path / "stock") == resumed


def test_a_rank_that_waits_for_another_one_to_start_is_recognised(tmp_path: Path) -> None:
    """Check it with a restart whose second rank ends before the ranks meet: no code of the plugin has run."""
    assert on_ranks(1, which_seem_to_hang, tmp_path, group=nullcontext) == [(True, False)]


def which_seem_to_hang(folder: Path) -> tuple[bool, bool]:
    """Return whether ranks that miss one, and ranks that fail, are recognised as hung in ``init_distributed``."""
    hanging = Group(fail, 2, folder / "missing rank")
    hanging.kill_one(1)
    failing = Group(fail, 2, folder / "failing rank")
    return hung_in_init_distributed(hanging.problem(HANG_S)), hung_in_init_distributed(failing.problem(timeout_s=100))
