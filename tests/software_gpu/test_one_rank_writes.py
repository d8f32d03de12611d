"""Check that a parameter of split masters that one rank has written to stops all ranks, wherever that is noticed."""

from __future__ import annotations

import pytest

from tests.software_gpu.one_rank_writes_ranks import BLOCKS, WAYS, WRITING_RANK
from tests.zero.training_once import ProgramRanks, TrainingOnce, on_one_worker

RANKS = ProgramRanks("tests.software_gpu.one_rank_writes_ranks", timeout_s=300)

NOTICED = {
    "step": "when an update began",
    "save": "when optimizer states were read or saved",
    "gather": "when a script gathered or read parameters",
    "read": "when optimizer states were read or saved",
    "write": "when optimizer states were read or saved",
    "read on one rank": "when optimizer states were read or saved",
}


@pytest.mark.promise("P6")
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=on_one_worker(RANKS.program, 2))])
def test_all_ranks_stop_with_the_rank_the_parameter_and_where_the_write_was_noticed(
    world_size: int, trained: TrainingOnce
) -> None:
    for rank, answers in enumerate(trained.answers(world_size)):
        assert len(answers) == len(BLOCKS) * len(WAYS)
        for found in answers:
            if rank == WRITING_RANK:
                assert found["error"].startswith("Master weights are lost"), found
                assert f"layers.0.weight on rank {WRITING_RANK} {NOTICED[found['way']]}" in found["error"], found
            else:
                assert f"rank {WRITING_RANK} cannot continue" in found["error"], found
