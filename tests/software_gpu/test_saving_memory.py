"""Check that saving a checkpoint needs no more memory with split masters than with whole ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deep_opt_states.device.kernels.split_form import CHUNK_NUMEL
from tests.launch import run_ranks
from tests.software_gpu.saving_memory_ranks import LAYERS, NUMEL
from tests.tiers import thorough
from tests.zero.memory.process_memory_ranks import LAYERS_PER_SUB_GROUP

UNITS = LAYERS // LAYERS_PER_SUB_GROUP
NOISE_BYTES = 4e6
"""The allowed difference between the memory of equal processes: 0.1 MB were measured. The masters take 100 MB."""

JOINING_BYTES = 2 * NUMEL // UNITS + 4 * 4 * CHUNK_NUMEL
"""The temporary memory in which the masters of one unit are joined: the rounded ones, and four tensors of a chunk."""

PLACEMENTS: dict[str, dict[str, Any]] = {
    "all three": {"placement": ["resident", "cpu", "streamed"] * (UNITS // 3), "num_slots": 1},
    "all on the CPU": {"placement": "cpu"},
    "all streamed": {"placement": "streamed", "num_slots": 1},
}


def saved(block: dict[str, Any], *, splits: bool) -> dict[str, Any]:
    """Return the answer of a process that trains and saves with these masters."""
    # With these settings, memory of any size returns to the system as soon as it is freed.
    malloc_options = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
    arguments = ["-m", "tests.software_gpu.saving_memory_ranks", json.dumps({**block, "split_masters": splits})]
    (finished,) = run_ranks(1, arguments, timeout_s=400, **malloc_options)
    assert finished.returncode == 0, finished.output[-4000:]
    answer: dict[str, Any] = finished.answers()[0]
    return answer


@pytest.mark.xdist_group("memory")
@pytest.mark.promise("P4")
@pytest.mark.parametrize("name", ["all three", *map(thorough, list(PLACEMENTS)[1:])])
def test_saving_takes_no_more_memory_at_its_peak_with_split_masters_than_with_whole_ones(name: str) -> None:
    whole = saved(PLACEMENTS[name], splits=False)
    split = saved(PLACEMENTS[name], splits=True)
    assert not whole["split"]
    assert sum(split["split"].values()) == NUMEL, "all masters are split when they are saved"
    assert NOISE_BYTES < 4 * NUMEL / 20
    assert split["peak_bytes"] <= whole["peak_bytes"] + NOISE_BYTES
    # The peak is lower, because training needs less memory. Saving may not use that up: units are joined one by one.
    assert split["peak_bytes"] - split["before_bytes"] <= JOINING_BYTES + NOISE_BYTES
