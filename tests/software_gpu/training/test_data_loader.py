"""Check that page-locked batches of forked workers, copied without blocking, train on the device to stock's bits."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.ranks import ranks
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import ADVERSARIES
from tests.zero.on_accelerator import on_accelerator
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import Block, Record, assert_same_bits, closing_engine, collect

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


@pytest.mark.promise("P1")
@ranks(1, group=software_process_group)
def test_training_on_the_device_from_forked_workers_has_the_bits_of_stock() -> None:
    stock, *_ = train_from_loader(None)
    for adversary in ("plain", "lazy"):
        for block in (None, STRIDE_2):
            with plugged(ADVERSARIES[adversary]):
                found, page_locked, pending = train_from_loader(block)
            assert_same_bits(stock, found)
            assert page_locked == [True] * 6
            assert pending == [False, block is not None], "workers must be forked while an update is in flight"
