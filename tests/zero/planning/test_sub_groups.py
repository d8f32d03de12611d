"""The performance model predicts the sub-groups that DeepSpeed makes."""

from __future__ import annotations

import pytest

from perf_model.schedule.workload import Partition, form_sub_groups
from perf_model.training_run.hf_config import parse_hf_config
from tests.launch import run_ranks
from tests.tiers import thorough
from tests.zero.planning.sub_group_ranks import CONFIG

SIZES = (1, 500, 3000, 20_000, 10**9)


@pytest.mark.parametrize("world_size", [1, thorough(3)])
def test_predicted_sub_groups_have_the_sizes_of_deepspeeds(world_size: int) -> None:
    finished, *_ = run_ranks(world_size, ["-m", "tests.zero.planning.sub_group_ranks", *map(str, SIZES)], timeout_s=200)
    assert finished.returncode == 0, finished.output[-4000:]
    parameters = [numel for _, numel in parse_hf_config(CONFIG.to_json_string(), name="small").parameters()]
    partitions = [Partition("", -(-numel // world_size)) for numel in parameters]
    predicted = [
        [sum(partition.numel for partition in group) for group in form_sub_groups(partitions, size)] for size in SIZES
    ]
    assert finished.answers() == predicted
    assert len(set(map(len, predicted))) == len(SIZES)
