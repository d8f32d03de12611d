"""Prints where ``get_fp32_grad_partitions`` has its tensors, and whether what users write into them counts.

Started as a program, on the recording accelerator, which tells host memory from its own.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.launch import answer
from tests.zero.parity.arm import Block, Record, closing_engine, collect, differences
from tests.zero.parity.case import Case
from tests.zero.parity.model import batch
from tests.zero.process_group import process_group
from tests.zero.recording.recording import recording

MIXED: Block = {"placement": ["streamed", "resident", "cpu", "resident", "streamed"], "num_slots": 1}
CASE = Case(name="gradient partitions", blocks=(MIXED,), clip=0.3)


def backward(engine: Any, step: int) -> None:
    x, target = (its.to(engine.device) for its in batch(CASE, 0, step, torch.bfloat16))
    engine.backward(engine(x, target, None, 1.0))


def partitions(engine: Any) -> list[torch.Tensor]:
    by_group = engine.optimizer.get_fp32_grad_partitions()
    return [grad for _, grads in sorted(by_group.items()) for _, grad in sorted(grads.items())]


def written_to(block: Block) -> tuple[Record, list[str]]:
    """Halve all gradients of three steps in place, and return the states after them, and where the gradients were."""
    devices = []
    with recording(), closing_engine(CASE, block) as engine:
        for step in range(3):
            backward(engine, step)
            for grad in partitions(engine):
                grad.mul_(0.5)
            devices += [str(grad.device) for grad in partitions(engine)]
            engine.step()
        record = Record()
        for index, grad in enumerate(partitions(engine)):
            record.tensors[f"partition {index}"] = grad.clone()
        collect(engine.optimizer, record)
        return record, devices


if __name__ == "__main__":
    with process_group():
        stock, where_stock = written_to(None)
        ours, where_ours = written_to(MIXED)
        answer({"stock": where_stock, "ours": where_ours, "differences": differences(stock, ours)})
