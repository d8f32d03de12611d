"""Compare the memory model with the reservations of the runtime and with the memory of a real engine's process."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

import deepspeed
import psutil
import pytest
import torch
from deepspeed.utils import safe_get_full_grad

from deep_opt_states.config import Config, parse_config
from perf_model.prediction.memory import Reservation, TrainingSetup, reserved_by_stock, reserved_by_the_runtime
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Partition
from tests.ranks import on_ranks

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


ON_CPU = {"placement": "cpu"}


def memory_of_training(block: dict[str, Any] | None) -> dict[str, Any]:
    """Train a wide model for some steps that read every gradient, and return the memory of the process."""
    model, config = wide_model(WIDTH, LAYERS)
    if block is not None:
        config["deep_optimizer_states"] = block
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
    }
    if block is not None:
        found["reserved"] = [(item.kind.value, item.each_bytes) for item in optimizer.accounting_device.reserved]
        engine.destroy()
        del optimizer
        gc.collect()
        found["destroyed_rss_bytes"] = rss_bytes()
    return found


def planned(numels: list[int]) -> UpdatePlan:
    config = parse_config({"deep_optimizer_states": ON_CPU})
    assert isinstance(config, Config)
    layers = LAYERS_PER_SUB_GROUP
    names = [[f"{layers * index + layer}.weight" for layer in range(layers)] for index in range(len(numels))]
    return config.plan(
        config.workload(
            [
                [Partition(name, numel // layers) for name in in_sub_group]
                for in_sub_group, numel in zip(names, numels, strict=True)
            ]
        )
    )


def total_bytes(reservations: Iterable[Reservation]) -> int:
    return sum(item.count * item.each_bytes for item in reservations)


def test_the_predicted_memory_is_reserved_and_used_by_the_process() -> None:
    """Check the CPU accelerator, where all takes 14 bytes per parameter, and stock 18.

    A GPU needs 16, since rounded parameters wait in host memory to be published.
    """
    # With these settings, memory of any size returns to the system as soon as it is freed.
    malloc_options = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
    stock, ours = (on_ranks(1, memory_of_training, block, **malloc_options)[0] for block in (None, ON_CPU))
    plan = planned(ours["numels"])
    assert len(plan.placements) == 6
    predicted = reserved_by_the_runtime(plan, TrainingSetup(widths=Widths(param=2, grad=2, publishes=False)))
    expected: Counter[tuple[str, int]] = Counter()
    for item in predicted:
        expected[item.kind.value, item.each_bytes] += item.count
    assert Counter((kind, each_bytes) for kind, each_bytes in ours["reserved"]) == +expected
    numel = sum(ours["numels"])
    assert total_bytes(predicted) == 14 * numel

    # On the CPU accelerator all reservations are host memory of exactly these sizes. They replace stock's states.
    growth = total_bytes(predicted) - total_bytes(reserved_by_stock(planned(stock["numels"])))
    assert growth == -4 * numel < -50e6, "the difference exceeds the noise of a process"
    assert ours["rss_bytes"] - stock["rss_bytes"] == pytest.approx(growth, abs=12e6)
    # Destroying the engine frees all of it, and buffers of DeepSpeed.
    assert ours["rss_bytes"] - ours["destroyed_rss_bytes"] >= total_bytes(predicted) - 12e6
    # While the states are created, only those of one sub-group, in the dtype of the model, are allocated temporarily.
    assert ours["peak_rss_bytes"] - ours["before_rss_bytes"] <= 1.05 * (ours["rss_bytes"] - ours["before_rss_bytes"])
