"""Check that checkpoints move between the device and the CPU accelerator, and between stock and the plugin."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten

from tests.ranks import ranks
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import LAZY
from tests.tiers import thorough
from tests.zero.parity.case import Case, by_sub_group
from tests.zero.parity.training import Block, Record, assert_same_bits, closing_engine, train

MIXED = by_sub_group("resident", "cpu", "streamed", "cpu", "streamed")
VARIANTS: dict[str, Block] = {"stock": None, "ours": MIXED}
PLACES: dict[str, Callable[[], AbstractContextManager[None]]] = {"CPU": nullcontext, "device": lambda: plugged(LAZY)}
CASE = Case(name="checkpoint transfer", blocks=(MIXED,), steps=3, clip=0.5)


def save(case: Case, block: Block, folder: Path) -> list[str]:
    """Train and save a checkpoint. Return the dtype, shape and device of every tensor in the files of this rank."""
    with closing_engine(case, block) as engine:
        train(engine, case, folder)
        engine.save_checkpoint(str(folder))
    (states,) = folder.glob(f"global_step*/*zero_pp_rank_{dist.get_rank()}_*optim_states.pt")
    (model,) = folder.glob(f"global_step*/*zero_pp_rank_{dist.get_rank()}_*model_states.pt")
    leaves, _ = tree_flatten([torch.load(path, weights_only=False) for path in (states, model)])
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device.type}" for tensor in tensors]


def resume(case: Case, block: Block, folder: Path) -> Record:
    """Load the checkpoint in ``folder`` into a fresh engine, train, and return the record."""
    with closing_engine(case, block) as engine:
        path, _ = engine.load_checkpoint(str(folder))
        assert path is not None
        return train(engine, case, folder)


@pytest.mark.P1
@pytest.mark.P4
@ranks(1, thorough(2), group=software_process_group)
def test_a_checkpoint_of_either_accelerator_resumes_on_the_other_with_the_bits_of_stock(tmp_path: Path) -> None:
    case = replace(CASE, world_size=dist.get_world_size())
    for place, context in PLACES.items():
        with context():
            files = {name: save(case, block, tmp_path / place / name) for name, block in VARIANTS.items()}
        assert len(files["stock"]) >= 20
        # Resident states are written back before they are saved, so that all are in host memory as with stock.
        assert files["ours"] == files["stock"]
    stock = resume(case, None, tmp_path / "CPU" / "stock")
    for saved_on, loaded_on in (("CPU", "device"), ("device", "CPU"), ("device", "device")):
        for saved_by, loaded_by in (("stock", "ours"), ("ours", "stock")):
            with PLACES[loaded_on]():
                assert_same_bits(stock, resume(case, VARIANTS[loaded_by], tmp_path / saved_on / saved_by))
