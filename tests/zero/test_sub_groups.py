"""The performance model plans for the sub-groups that DeepSpeed really makes."""

from __future__ import annotations

import pytest

from perf_model.schedule.workload import Workload
from perf_model.training_run.hf_config import parse_hf_config
from tests.launch import run_ranks
from tests.tiers import thorough
from tests.zero.scripts.sub_groups import CONFIG

SIZES = (1, 500, 3000, 20_000, 10**9)


@pytest.mark.parametrize("world_size", [1, thorough(3)])
def test_a_model_is_cut_as_deepspeed_cuts_it(world_size: int) -> None:
    finished, *_ = run_ranks(world_size, ["-m", "tests.zero.scripts.sub_groups", *map(str, SIZES)], timeout_s=200)
    assert finished.returncode == 0, finished.output[-4000:]
    parameters = parse_hf_config(CONFIG.to_json_string(), name="small").parameters()
    predicted = [Workload.of_parameters(parameters, world_size, size) for size in SIZES]
    assert finished.answers() == [[its.numel for its in workload.sub_groups] for workload in predicted]
    assert len({len(workload.sub_groups) for workload in predicted}) == len(SIZES)
