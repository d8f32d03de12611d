"""Check that universal and delinked checkpoints of split masters resume with the bits of stock."""

from __future__ import annotations

import pytest

from tests.software_gpu.training.split_checkpoints_ranks import KINDS, MASTERS, SPLIT, TRANSFERS
from tests.zero.training_once import ProgramRanks, TrainingOnce, on_one_worker

RANKS = ProgramRanks("tests.software_gpu.training.split_checkpoints_ranks", timeout_s=300)
pytestmark = on_one_worker(RANKS.program)


@pytest.mark.promise("P1", "P4")
@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_checkpoint_of_split_masters_resumes_with_the_bits_of_stock(
    kind: str, trained: TrainingOnce
) -> None:
    (answers,) = trained.answers(1)
    saved = {found["saved"]: found for found in answers if "saved" in found}
    loaded = {found["transfer"]: found for found in answers if "transfer" in found}
    for variant in MASTERS:
        assert bool(saved[f"{kind}: {variant}"]["split on"]) == (variant == SPLIT), variant
    for saved_by, loaded_by in TRANSFERS:
        found = loaded[f"{kind}: {saved_by} to {loaded_by}"]
        assert found["split on"] == (["accelerator", "cpu"] if loaded_by == SPLIT else []), found["transfer"]
        assert found["tensors"] >= 40
        assert len(set(found["losses"])) == 3, "training that changes nothing has equal bits, too"
        assert found["differences"] == [], found["transfer"]
