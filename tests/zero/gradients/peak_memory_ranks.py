"""Print the peak memory of training on the GPU in software, with stock DeepSpeed and with the plugin.

The peak consists of memory allocated after the start and of the plugin's reservations at the start. Memory that both
variants allocate at the start, such as parameters and the bucket, is not counted. The arguments are numbers of
micro-batches per step, which are measured one after the other.
"""

from __future__ import annotations

import sys

import deepspeed
import torch

from tests.launch import answer
from tests.software_gpu import device
from tests.software_gpu.faults.faults import sums_on_the_host
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.zero.parity.training import Block

WIDTH, LAYERS, STEPS = 2600, 3, 2


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
    with plugged(), sums_on_the_host():
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        device.reset_peak_memory_stats()
        at_start = device.memory_allocated()
        for _ in range(STEPS * accumulation):
            loss = engine(torch.ones(1, WIDTH, dtype=torch.bfloat16, device=engine.device)).float().square().mean()
            engine.backward(loss)
            engine.step()
        peak = device.max_memory_allocated() - at_start
        reserved = 0
        if block is not None:
            accounting_device = engine.optimizer.accounting_device
            reserved = sum(item.each_bytes for item in accounting_device.reserved if item.kind.value == "accelerator")
        engine.destroy()
    return peak + reserved


if __name__ == "__main__":
    with software_process_group():
        for accumulation in map(int, sys.argv[1:]):
            stock, ours = (peak_bytes(block, accumulation) for block in (None, {"placement": "cpu"}))
            answer({"accumulation": accumulation, "stock": stock, "ours": ours})
