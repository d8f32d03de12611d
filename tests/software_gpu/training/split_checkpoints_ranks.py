"""Convert and delink checkpoints that are saved with split masters on the device, and print the differences from stock.

Stock saves and loads on the CPU accelerator, the plugin on the device. One rank runs this program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.launch import answer
from tests.sharing import delink_ranks
from tests.sharing.shared_ranks import make_model
from tests.sharing.stack_model import Stack
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import LAZY
from tests.zero.checkpoints.checkpoint_jobs import FIRST_TAG, UNIVERSAL, convert_to_universal
from tests.zero.parity.case import SPLIT_MASTERS, WHOLE_MASTERS, Case
from tests.zero.parity.split_numels import counted_splits
from tests.zero.parity.training import Block, Record, closing_engine, differences, shared_folder, train

STOCK, WHOLE, SPLIT = "stock", "whole masters", "split masters"
MASTERS = {STOCK: None, WHOLE: WHOLE_MASTERS, SPLIT: SPLIT_MASTERS}
"""The part of the plugin's block for each variant; None is stock DeepSpeed."""
MIXED = {"placement": ["resident", "cpu", "streamed", "cpu", "streamed"]}
TRANSFERS = ((SPLIT, STOCK), (SPLIT, SPLIT), (SPLIT, WHOLE), (STOCK, SPLIT), (WHOLE, SPLIT))
"""The variants that save and that load. Each pair is compared with stock that loads what stock has saved."""

CASE = Case(name="split checkpoints", blocks=(), steps=3, clip=0.5)
MOMENTS = "mean"
SHARING = delink_ranks.CASES[MOMENTS]
"""A model in bf16 whose layers share the parameters of two."""
SHARING_PLACEMENT = {"placement": "stride", "update_stride": 2, "unit_size": 60}


def save(variant: str, folder: Path) -> None:
    """Train the case, and save a checkpoint that is converted to a universal one."""
    with closing_engine(CASE, block_of(variant, MIXED)) as engine:
        train(engine, CASE, folder)
        engine.save_checkpoint(str(folder))


def load(variant: str, folder: Path) -> Record:
    """Load the universal checkpoint into a fresh engine, train, and return the record."""
    case = replace(CASE, extra=UNIVERSAL)
    with closing_engine(case, block_of(variant, MIXED)) as engine:
        path, _ = engine.load_checkpoint(str(folder))
        assert path is not None
        return train(engine, case, folder)


def block_of(variant: str, placement: dict[str, Any]) -> Block:
    """Return the plugin's block with ``placement``, or None for stock."""
    masters = MASTERS[variant]
    return None if masters is None else {**placement, **masters}


@contextmanager
def sharing_engine(variant: str, model: torch.nn.Module, **changes: Any) -> Iterator[Any]:
    """Yield an engine that trains ``model`` in the case of shared layers, and destroy it when the context ends."""
    engine = delink_ranks.make_engine(model, SHARING, block_of(variant, SHARING_PLACEMENT), **changes)
    try:
        yield engine
    finally:
        engine.destroy()


def save_shared(variant: str, folder: Path) -> None:
    """Train shared layers, and save a checkpoint that is delinked."""
    with sharing_engine(variant, make_model(SHARING)) as engine:
        delink_ranks.train(engine, Record())
        engine.save_checkpoint(str(folder))


def load_delinked(variant: str, folder: Path) -> Record:
    """Load the delinked checkpoint into a model with layers of its own, train, and return the record."""
    torch.manual_seed(99)
    with sharing_engine(variant, Stack(SHARING.layers), checkpoint={"load_universal": True}) as engine:
        path, _ = engine.load_checkpoint(str(folder))
        assert path is not None
        record = Record()
        delink_ranks.train(engine, record)
        return record


KINDS: dict[str, tuple[Callable[[str, Path], None], Callable[[Path], None], Callable[[str, Path], Record]]] = {
    "universal": (save, partial(convert_to_universal, tag=FIRST_TAG), load),
    "delinked": (save_shared, partial(delink_ranks.delink_checkpoint, moments=MOMENTS, case=SHARING), load_delinked),
}
"""The functions that save, convert and load, by the kind of conversion."""


@contextmanager
def accelerator_of(variant: str) -> Iterator[Counter[str]]:
    """Run the block on the accelerator of the variant, and yield the number of masters that it splits."""
    with counted_splits() as splits:
        if variant == STOCK:
            yield splits
        else:
            with plugged(LAZY):
                yield splits


def main() -> None:
    for kind, (save_variant, convert, load_variant) in KINDS.items():
        with shared_folder() as folder:
            for variant in MASTERS:
                (folder / variant).mkdir()
                with accelerator_of(variant) as splits:
                    save_variant(variant, folder / variant)
                answer({"saved": f"{kind}: {variant}", "split on": sorted(splits)})
                convert(folder / variant)
            expected = load_variant(STOCK, folder / STOCK)
            for saved_by, loaded_by in TRANSFERS:
                with accelerator_of(loaded_by) as splits:
                    found = load_variant(loaded_by, folder / saved_by)
                answer(
                    {
                        "transfer": f"{kind}: {saved_by} to {loaded_by}",
                        "split on": sorted(splits),
                        "tensors": len(expected.tensors),
                        "losses": expected.numbers["loss"],
                        "differences": differences(expected, found),
                    }
                )


if __name__ == "__main__":
    with software_process_group():
        main()
