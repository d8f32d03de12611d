"""Train a wide model for some steps that read every gradient, and print the memory of the process.

The argument is the block as JSON, or "stock".
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from typing import Any

import deepspeed
import psutil
import torch
from deepspeed.utils import safe_get_full_grad

from tests.launch import answer
from tests.zero.process_group import process_group

WIDTH, LAYERS = 2048, 12
LAYERS_PER_SUB_GROUP = 2


def wide_model(width: int, layers: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return a model, and stock's config, in which ``LAYERS_PER_SUB_GROUP`` weights fill a sub-group of whole pages.

    Nothing is gathered ahead or kept, so that the memory is that of states, gradients and one layer.
    """
    # Biases would begin sub-groups in the middle of a page.
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    sub_group_size = LAYERS_PER_SUB_GROUP * width * width
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "sub_group_size": sub_group_size,
            "stage3_max_live_parameters": 0,
            "stage3_prefetch_bucket_size": 0,
            # On the CPU accelerator the bucket is host memory, too. It is allocated after the peak.
            "reduce_bucket_size": sub_group_size,
        },
    }
    return model, config


def main(block: str) -> None:
    model, config = wide_model(WIDTH, LAYERS)
    if block != "stock":
        config["deep_optimizer_states"] = json.loads(block)
    with PeakMemory() as peak:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(3):
        loss = engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().square().mean()
        engine.backward(loss)
        for param in model.parameters():
            safe_get_full_grad(param)
        engine.step()
    gc.collect()
    optimizer = engine.optimizer
    found = {
        "before_rss_bytes": peak.before_bytes,
        "peak_rss_bytes": peak.bytes,
        "rss_bytes": rss_bytes(),
        "numels": [master.numel() for master in optimizer.fp32_partitioned_groups_flat],
        "reserved": [],
    }
    if block != "stock":
        found["reserved"] = [(item.kind.value, item.each_bytes) for item in optimizer.accounting_device.reserved]
        engine.destroy()
        del optimizer
        gc.collect()
        found["destroyed_rss_bytes"] = rss_bytes()
    answer(found)


def rss_bytes() -> int:
    return psutil.Process().memory_info().rss


class PeakMemory:
    """The peak of the resident memory of the process, sampled every millisecond."""

    def __enter__(self) -> PeakMemory:
        self.before_bytes = self.bytes = rss_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(1e-3):
            self.bytes = max(self.bytes, rss_bytes())


if __name__ == "__main__":
    with process_group():
        main(sys.argv[1])
