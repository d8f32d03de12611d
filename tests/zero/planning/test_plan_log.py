"""Check the log of a plan on rank 0 with a GPU: the memory per placement, and the reason why nothing is streamed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deep_opt_states.config import Config
from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.host.cores import CoreShare
from deep_opt_states.zero.start import devices, planning
from deep_opt_states.zero.start.devices import AcceleratorChoice
from deep_opt_states.zero.start.planning import PlannedRun, make_plan
from perf_model.prediction.memory import TrainingSetup
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.workload import Partition
from tests.model.profiles import profile

CUDA = AcceleratorChoice(HostDevice(), slots_on_host=False)
SUB_GROUPS = [[Partition("layers.0.weight", 1_000_000_000)], [Partition("layers.1.weight", 500_000_000)]]
WHOLE = {"unit_size": 1_000_000_000}
"""A setting with which each sub-group is one unit."""

BF16, BF16_SUMMED_IN_FP32 = Widths(param=2, grad=2), Widths(param=2, grad=4)


@pytest.fixture(autouse=True)
def one_rank_with_a_gpu_of_80_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "raise_together", lambda action: action())
    monkeypatch.setattr(planning, "same_on_all_ranks", lambda find, describe: find())
    monkeypatch.setattr(planning, "Ranks", lambda: SimpleNamespace(rank=0, gather=lambda value: [value]))
    monkeypatch.setattr(planning, "_load_profile", lambda *_: profile())
    monkeypatch.setattr(devices, "_no_gpu_adam", lambda: "")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 80 * 10**9))


def by_layer(first: str, second: str) -> list[dict[str, str]]:
    return [{"match": "layers.0.*", "states": first}, {"match": "*", "states": second}]


def planned(widths: Widths = BF16, **block: Any) -> PlannedRun:
    setup = TrainingSetup(widths=widths, accumulates=True)
    config, share = Config(**block), CoreShare(threads=1, reason="a test")
    return make_plan(config, SUB_GROUPS, setup, CUDA, CUDA.gpu_budget(config), share)


@pytest.mark.parametrize(
    ("widths", "gpu_memory_gb", "budget", "taken", "needed"),
    [(BF16, 8.0, "8.0 GB", "9.0 GB", "9.1"), (BF16_SUMMED_IN_FP32, 10.0, "10.0 GB", "12.0 GB", "12.1")],
)
def test_the_reason_states_the_budget_that_the_user_has_set(
    widths: Widths, gpu_memory_gb: float, budget: str, taken: str, needed: str
) -> None:
    found = planned(widths, gpu_memory_gb=gpu_memory_gb, **WHOLE)
    reason = (
        f"Nothing is streamed: the budget of {budget} of GPU memory cannot hold a slot and the gradients, {taken}. "
        f'Set "gpu_memory_gb" to at least {needed}, lower "unit_size", or use more ranks.'
    )
    assert found.at_start() == f"{found.plan}. {reason}"
    assert found.at_end(found.plan, widths)[-1] == reason


def test_without_a_budget_the_reason_is_that_free_memory_is_not_known_yet() -> None:
    found = planned()
    reason = "Nothing is streamed: the planner uses no GPU memory until the first steps have shown how much is free."
    assert found.at_start() == f"{found.plan}. {reason}"


def test_a_missing_gpu_kernel_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_no_gpu_adam", lambda: "The GPU Adam kernel needs Triton: pip install triton==3.6.0")
    found = planned()
    reason = "Nothing is streamed: The GPU Adam kernel needs Triton: pip install triton==3.6.0"
    assert found.at_start() == f"{found.plan}. {reason}"


def test_no_reason_is_logged_if_something_is_streamed_or_the_config_decides() -> None:
    for found in (
        planned(gpu_memory_gb=8.0),
        planned(gpu_memory_gb=10.0, **WHOLE),
        planned(placement="cpu", profile="p.json"),
    ):
        assert found.at_start() == f"{found.plan}."
        assert "Nothing is streamed" not in "".join(found.at_end(found.plan, BF16))


def test_the_memory_of_each_placement_is_logged() -> None:
    found = planned(placement=by_layer("streamed", "cpu"), num_slots=1, **WHOLE)
    assert found.at_end(found.plan, BF16) == [
        "cpu: 1 unit, 500,000,000 parameters, 8.00 GB of host memory",
        "streamed: 1 unit, 1,000,000,000 parameters, 16.0 GB of host memory, on the accelerator 1 slot of "
        "12.0 GB and 2.00 GB of gradients",
    ]
    found = planned(placement=by_layer("resident", "streamed"), **WHOLE)
    assert found.at_end(found.plan, BF16_SUMMED_IN_FP32) == [
        "streamed: 1 unit, 500,000,000 parameters, 9.00 GB of host memory, on the accelerator 1 slot of 6.00 GB "
        "and 2.00 GB of gradients",
        "resident: 1 unit, 1,000,000,000 parameters, 18.0 GB of host memory, on the accelerator 12.0 GB of states "
        "and 4.00 GB of gradients",
    ]
