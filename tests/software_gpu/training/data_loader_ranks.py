"""Train from a DataLoader with forked workers and page-locked batches, and print the differences from stock on the CPU.

The batches are copied to the device without blocking the host. Workers are forked while an update is in flight.
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, Dataset

from tests.launch import answer
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import ADVERSARIES
from tests.zero.on_accelerator import on_accelerator
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import Block, Record, closing_engine, collect, differences

EPOCHS, STEPS_PER_EPOCH = 2, 3

CASE = Case(name="data loader", blocks=(STRIDE_2,), clip=0.5)


class ParityBatches(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The batches of one epoch."""

    def __init__(self, epoch: int) -> None:
        self._first = epoch * STEPS_PER_EPOCH

    def __len__(self) -> int:
        return STEPS_PER_EPOCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return batch(CASE, 0, self._first + index, torch.bfloat16)


def train_from_loader(block: Block) -> tuple[Record, list[bool], list[bool]]:
    """Return the record, whether each batch is page-locked, and whether an update is in flight when workers start."""
    record = Record()
    losses: list[torch.Tensor] = []
    page_locked, pending = [], []
    with closing_engine(CASE, block) as engine:
        for epoch in range(EPOCHS):
            pending.append(block is not None and engine.optimizer._running.executor.pending)
            loader = DataLoader(
                ParityBatches(epoch),
                batch_size=None,
                num_workers=2,
                pin_memory=engine.device.type != "cpu",
                multiprocessing_context="fork",
            )
            for tensors in loader:
                page_locked.append(all(tensor.is_pinned() for tensor in tensors))
                loss = engine(*map(on_accelerator, tensors), None, 1.0)
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach())
        record.numbers["loss"] = [loss.item() for loss in losses]
        collect(engine.optimizer, record)
    return record, page_locked, pending


def main() -> None:
    expected, *_ = train_from_loader(None)
    for adversary in ("plain", "lazy"):
        for block in (None, STRIDE_2):
            with plugged(ADVERSARIES[adversary]):
                found, page_locked, pending = train_from_loader(block)
            answer(
                {
                    "adversary": adversary,
                    "plugin": block is not None,
                    "differences": differences(expected, found),
                    "page-locked": page_locked,
                    "pending": pending,
                }
            )


if __name__ == "__main__":
    with software_process_group():
        main()
