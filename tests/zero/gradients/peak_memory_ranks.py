"""Print the peak memory of training on the recording accelerator, with stock DeepSpeed and with the plugin.

The peak consists of memory allocated after the start and of the plugin's reservations at the start. Memory that both
variants allocate at the start, such as parameters and the bucket, is not counted. The arguments are numbers of
micro-batches per step, which are measured one after the other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import deepspeed
import torch

from tests.launch import answer
from tests.zero.parity.training import Block
from tests.zero.process_group import process_group
from tests.zero.race_detector.detector import Recorder
from tests.zero.race_detector.instrumentation import recording
from tests.zero.race_detector.storages import Memory, Place

WIDTH, LAYERS, STEPS = 2600, 3, 2


class Peak:
    """The maximum over time of the bytes of all live storages on the accelerator."""

    def __init__(self) -> None:
        self.bytes = 0
        self._sizes: list[tuple[Memory, int]] = []

    @contextmanager
    def watched(self, recorder: Recorder) -> Iterator[None]:
        allocated = recorder.allocated

        def counted(tensor: torch.Tensor, place: Place) -> Memory:
            memory = allocated(tensor, place)
            if place is Place.ACCELERATOR:
                alive = [(other, size) for other, size in self._sizes if not other.alive.expired()]
                self._sizes = [*alive, (memory, tensor.untyped_storage().nbytes())]
                self.bytes = max(self.bytes, sum(size for _, size in self._sizes))
            return memory

        with mock.patch.object(recorder, "allocated", counted):
            yield


def peak_bytes(block: Block, accumulation: int) -> int:
    # Each layer is one sub-group with one parameter, the weight.
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "timers": {"throughput": {"enabled": False}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "sub_group_size": WIDTH * WIDTH,
            "reduce_bucket_size": WIDTH * WIDTH,
        },
    }
    if block is not None:
        config["deep_optimizer_states"] = block
    with recording() as recorder:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        peak = Peak()
        with peak.watched(recorder):
            for _ in range(STEPS * accumulation):
                loss = engine(torch.ones(1, WIDTH, dtype=torch.bfloat16, device=engine.device)).float().square().mean()
                engine.backward(loss)
                engine.step()
        reserved = 0
        if block is not None:
            accounting_device = engine.optimizer.accounting_device
            reserved = sum(item.each_bytes for item in accounting_device.reserved if item.kind.value == "accelerator")
        engine.destroy()
    return peak.bytes + reserved


if __name__ == "__main__":
    with process_group():
        for accumulation in map(int, sys.argv[1:]):
            stock, ours = (peak_bytes(block, accumulation) for block in (None, {"placement": "cpu"}))
            answer({"accumulation": accumulation, "stock": stock, "ours": ours})
