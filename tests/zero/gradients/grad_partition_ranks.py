"""Print the devices of the tensors of ``get_fp32_grad_partitions``, and whether values written into them take effect.

The program runs on the GPU in software, which has its own memory.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.launch import answer
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.zero.parity.case import Case, by_sub_group
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import Block, Record, closing_engine, collect, differences

MIXED: Block = {**by_sub_group("streamed", "resident", "cpu", "resident", "streamed"), "num_slots": 1}
CASE = Case(name="gradient partitions", blocks=(MIXED,), clip=0.3)


def backward(engine: Any, step: int) -> None:
    x, target = (tensor.to(engine.device) for tensor in batch(CASE, 0, step, torch.bfloat16))
    engine.backward(engine(x, target, None, 1.0))


def grad_partitions(engine: Any) -> list[torch.Tensor]:
    by_group = engine.optimizer.get_fp32_grad_partitions()
    return [grad for _, grads in sorted(by_group.items()) for _, grad in sorted(grads.items())]


def train_with_halved_gradients(block: Block) -> tuple[Record, list[str]]:
    """Train three steps, halve all gradients in place, and return the final states and the devices of the gradients."""
    devices = []
    with plugged(), closing_engine(CASE, block) as engine:
        for step in range(3):
            backward(engine, step)
            for grad in grad_partitions(engine):
                grad.mul_(0.5)
            devices += [str(grad.device) for grad in grad_partitions(engine)]
            engine.step()
        record = Record()
        for index, grad in enumerate(grad_partitions(engine)):
            record.tensors[f"partition {index}"] = grad.clone()
        collect(engine.optimizer, record)
        return record, devices


if __name__ == "__main__":
    with software_process_group():
        stock, stock_devices = train_with_halved_gradients(None)
        ours, our_devices = train_with_halved_gradients(MIXED)
        answer({"stock": stock_devices, "ours": our_devices, "differences": differences(stock, ours)})
