"""The performance model predicts the sub-groups that DeepSpeed makes of a small Llama."""

from __future__ import annotations

import deepspeed
import torch.distributed as dist

from perf_model.schedule.workload import Partition, form_sub_groups
from perf_model.training_run.hf_config import parse_hf_config
from tests.ranks import ranks
from tests.tiers import thorough
from tests.tiny_llama import tiny_llama

SIZES = (1, 500, 3000, 5000, 10**9)


@ranks(1, thorough(3))
def test_predicted_sub_groups_have_the_sizes_of_deepspeeds() -> None:
    numels = [numel for _, numel in parse_hf_config(tiny_llama().config.to_json_string(), name="small").parameters()]
    partitions = [Partition("", -(-numel // dist.get_world_size())) for numel in numels]
    counts = set()
    for size in SIZES:
        model = tiny_llama()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "sub_group_size": size},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        predicted = [sum(partition.numel for partition in group) for group in form_sub_groups(partitions, size)]
        assert predicted == [flat.numel() for flat in engine.optimizer.fp32_partitioned_groups_flat]
        counts.add(len(predicted))
        engine.destroy()
    assert len(counts) == len(SIZES)
