"""Check that a training engine that knows the same plans as ``plan`` does, and that other ranks restore its plan."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from deep_opt_states.config import Config
from deep_opt_states.runtime.gpu_budget import OBSERVED_STEPS, GpuBudget
from perf_model.__main__ import main
from perf_model.prediction.cost import CostModel
from perf_model.prediction.hardware import HardwareProfile
from perf_model.prediction.memory import TrainingSetup
from perf_model.prediction.overlap_windows import Windows
from perf_model.presets.machines import MACHINES
from perf_model.presets.models import MODELS
from perf_model.replanning.measurements import WindowMeasurement
from perf_model.replanning.policy import ReplanningPolicy
from perf_model.schedule.cutting import BORDER_MULTIPLE
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.rules import PlacementRule, PlacementRules
from perf_model.schedule.workload import Partition
from perf_model.search.budgets import Budgets
from perf_model.search.plan_request import PlanRequest, SizedPlan
from perf_model.search.unit_sizes import UNIT_SIZES
from perf_model.training_run.job import DEFAULT_SUB_GROUP_SIZE, Job
from perf_model.units import GB
from tests.model.costs import cost

SEQUENCE = 2048


@dataclass(frozen=True)
class PlanSetting:
    """The arguments of ``plan``."""

    machine: str
    model: str
    world_size: int
    ranks_per_node: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.machine} {self.model} x{self.world_size} micro-batch {self.micro_batch}"

    @property
    def profile(self) -> HardwareProfile:
        return MACHINES[self.machine].profile(min(self.ranks_per_node, self.world_size))

    @property
    def job(self) -> Job:
        return Job(
            shape=MODELS[self.model],
            world_size=self.world_size,
            ranks_per_node=self.ranks_per_node,
            micro_batch=self.micro_batch,
            sequence=SEQUENCE,
        )

    @property
    def arguments(self) -> list[str]:
        options = {
            "profile": self.machine,
            "model": self.model,
            "world-size": self.world_size,
            "ranks-per-node": self.ranks_per_node,
            "micro-batch": self.micro_batch,
            "sequence": SEQUENCE,
        }
        return ["plan", "--json", *(text for key, value in options.items() for text in (f"--{key}", str(value)))]


SETTINGS = (
    PlanSetting("h100-pcie5", "Llama-3-8B", 1, 1, 1),
    PlanSetting("a100-pcie4", "20B", 4, 4, 1),
    PlanSetting("gh200", "13B", 1, 1, 1),
    PlanSetting("h200-pcie5", "13B", 1, 1, 2),
    PlanSetting("a100-pcie4", "7B", 1, 1, 1),
    PlanSetting("a100-pcie4", "7B", 2, 2, 4),
    PlanSetting("a100-pcie4", "8.3B", 2, 2, 1),
    PlanSetting("a100-pcie4", "Llama-3-8B", 1, 1, 2),
    PlanSetting("a100-pcie4", "13B", 2, 2, 1),
    PlanSetting("a100-pcie4", "Llama-3-70B", 32, 8, 1),
    PlanSetting("h100-pcie5", "7B", 1, 1, 1),
    PlanSetting("h100-pcie5", "10B", 2, 2, 2),
    PlanSetting("h100-pcie5", "Qwen2.5-7B", 1, 1, 1),
    PlanSetting("h100-pcie5", "20B", 2, 2, 1),
    PlanSetting("h100-pcie5", "Llama-3-70B", 64, 8, 2),
    PlanSetting("h200-pcie5", "20B", 2, 2, 1),
    PlanSetting("h200-pcie5", "Llama-3-8B", 1, 1, 4),
    PlanSetting("gh200", "Llama-3-8B", 1, 1, 1),
    PlanSetting("gh200", "20B", 2, 1, 1),
    PlanSetting("gh200", "Qwen2.5-7B", 1, 1, 2),
)

IN_MAKE_TEST = 2
"""The number of settings in ``make test``; the others are thorough."""


def sub_groups_of_deepspeed(names: Sequence[tuple[str, int]], ranks: int, size: int) -> list[list[Partition]]:
    """Return the sub-groups as ``stage3.py`` forms them from ``partition_numel()`` (``_create_fp16_sub_groups``)."""
    every = []
    for name, numel in names:
        padding = (ranks - numel % ranks) % ranks
        every.append(Partition(name, (numel + padding) // ranks))
    if size >= sum(partition.numel for partition in every):
        return [every]
    formed, group, taken = [], [], 0
    for partition in every:
        group.append(partition)
        taken += partition.numel
        if taken >= size or partition is every[-1]:
            formed.append(group)
            group, taken = [], 0
    return formed


def budget_of_training(setting: PlanSetting, block: Config) -> int:
    """Return the budget of a GPU of which the first steps have left free what ``plan`` assumes."""
    limit = block.gpu_memory_gb
    budget = GpuBudget(
        start_bytes=0 if limit is None else int(limit * GB),
        margin_bytes=int(block.gpu_memory_margin_gb * GB),
        fills=limit is None,
    )
    assert setting.profile.gpu_memory_bytes is not None
    for _ in range(OBSERVED_STEPS):
        free_bytes = setting.profile.gpu_memory_bytes - setting.job.gpu_bytes - setting.job.memory.cache_bytes
        budget.observe(free_bytes, alloc_retries=0, held_bytes=0)
    return budget.bytes


def plan_as_the_engine(setting: PlanSetting, printed: dict[str, Any]) -> SizedPlan:
    """Plan with what a training engine knows: its partitions by name, the profile, and measured windows and memory."""
    config = printed["deepspeed_config"]
    block = config["deep_optimizer_states"]
    budgets = Budgets(gpu_bytes=budget_of_training(setting, Config(**block)))
    profile = HardwareProfile.from_json(setting.profile.to_json())
    parameters = MODELS[setting.model].parameters()
    size = config["zero_optimization"].get("sub_group_size", DEFAULT_SUB_GROUP_SIZE)
    without_decay = [pair for pair in parameters if "norm" in pair[0] or pair[0].endswith(".bias")]
    param_groups = [[pair for pair in parameters if pair not in without_decay], without_decay]
    sub_groups = [
        sub_group for group in param_groups for sub_group in sub_groups_of_deepspeed(group, setting.world_size, size)
    ]
    widths = Widths(param=2, grad=2)
    at_start = PlanRequest(
        sub_groups=sub_groups,
        unit_sizes=(block["unit_size"],) if "unit_size" in block else UNIT_SIZES,
        cost=CostModel.from_profile(profile, widths.param),
        budgets=Budgets(gpu_bytes=0),
        windows=Windows(),
        setup=TrainingSetup(widths=widths),
    )
    policy = ReplanningPolicy(at_start, at_start.plan().planned.plan)
    measured = WindowMeasurement(
        first_step=1, last_step=5, by_kind={}, windows=Windows(**printed["windows"]), exposed_s=1.0
    )
    decision = policy.observe(measured, budgets, MODELS[setting.model].uses())
    assert decision is not None
    return decision.chosen


def print_plan(setting: PlanSetting, *options: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([*setting.arguments, *options]) == 0
    return printed.getvalue()


@pytest.mark.promise("P5")
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(setting, id=str(setting), marks=[pytest.mark.thorough] if number >= IN_MAKE_TEST else [])
        for number, setting in enumerate(SETTINGS)
    ],
)
def test_the_engine_finds_the_printed_plan_with_the_printed_seconds(setting: PlanSetting) -> None:
    printed = json.loads(print_plan(setting))
    found = plan_as_the_engine(setting, printed)
    assert {**found.to_json_dict(), "order": None} == {**printed["plan"], "order": None}
    assert found.planned.exposed_s == printed["predicted"]["exposed_update_s"], "equal, not only near"
    assert found.planned.update_s == printed["predicted"]["update_s"]
    # With DeepSpeed's default sub-groups of 1e9 parameters, the first versions left nearly everything on the CPU.
    plan = found.plan
    assert plan.numel(Placement.CPU) <= 0.6 * plan.workload.numel
    assert found.planned.exposed_s <= 0.5 * printed["baselines"]["all_cpu"]["exposed_update_s"]


@pytest.mark.parametrize(
    "options",
    [
        {"unit_size": 70_000_000},
        {"gpu_memory_margin_gb": 6.5},
        {"gpu_memory_margin_gb": 0.0},
        {"gpu_memory_gb": 40.0},
        {"gpu_memory_gb": 40.0, "gpu_memory_margin_gb": 6.5},
    ],
    ids=str,
)
def test_the_engine_finds_the_printed_plan_with_options_that_the_config_has(options: dict[str, float]) -> None:
    setting = SETTINGS[0]
    arguments = [text for key, value in options.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    printed = json.loads(print_plan(setting, *arguments))
    block = printed["deepspeed_config"]["deep_optimizer_states"]
    assert block.keys() & {"unit_size", "gpu_memory_gb", "gpu_memory_margin_gb"} == options.keys()
    found = plan_as_the_engine(setting, printed)
    assert {**found.to_json_dict(), "order": None} == {**printed["plan"], "order": None}
    assert found.planned.exposed_s == printed["predicted"]["exposed_update_s"]


def test_the_settings_are_of_different_machines_models_ranks_and_micro_batches() -> None:
    assert len(set(SETTINGS)) == 20
    for key, least in {"machine": 4, "model": 7, "world_size": 4, "micro_batch": 3}.items():
        assert len({getattr(setting, key) for setting in SETTINGS}) >= least, key


LAYERS = [[Partition(f"layers.{layer}.weight", BORDER_MULTIPLE * (2_000_000 + layer)) for layer in range(12)]]

REQUEST = PlanRequest(
    sub_groups=LAYERS,
    unit_sizes=(LAYERS[0][-1].numel,),
    cost=cost(cpu=1.5e9, h2d=25e9, d2h=26e9, both=42e9, dram=90e9, gpu=8e10, latency=1e-5),
    budgets=Budgets(gpu_bytes=2 * 10**9),
    windows=Windows(backward_s=0.05, forward_s=0.05),
)


def test_another_rank_restores_the_plan_from_the_decisions() -> None:
    request = replace(REQUEST, uses=[f"layers.{layer}.weight" for layer in reversed(range(12))])
    chosen = request.plan()
    assert len(set(chosen.plan.placements)) > 1
    received = json.loads(json.dumps(chosen.to_json_dict()))
    assert replace(request, windows=Windows()).restore(received) == chosen.plan


def test_a_rank_with_other_sub_groups_refuses_the_decisions() -> None:
    other = [[*LAYERS[0][:-1], Partition("layers.11.weight", LAYERS[0][0].numel)]]
    with pytest.raises(ValueError, match="Use the same model and config on every rank"):
        replace(REQUEST, sub_groups=other).restore(REQUEST.plan().to_json_dict())


def test_units_are_used_in_the_order_of_their_parameters_and_unused_ones_last() -> None:
    request = replace(REQUEST, uses=["layers.5.weight", "layers.2.weight"])
    others = [index for index in range(12) if index not in (5, 2)]
    assert request.first_use_of(request.workload(*request.unit_sizes)) == (5, 2, *others)


def test_units_that_forward_uses_late_are_those_that_the_cpu_updates() -> None:
    def mean_place_on_cpu(request: PlanRequest) -> float:
        on_cpu = [index for index, placement in enumerate(request.plan().plan.placements) if placement is Placement.CPU]
        return sum(on_cpu) / len(on_cpu)

    # In a shorter forward, most of the update is exposed wherever the CPU's units are.
    request = replace(REQUEST, windows=Windows(backward_s=0.05, forward_s=0.15))
    backwards = replace(request, uses=[partition.name for partition in reversed(LAYERS[0])])
    assert mean_place_on_cpu(request) > 5.5 > mean_place_on_cpu(backwards)


def test_rules_place_their_parameters_in_the_plan() -> None:
    rules = PlacementRules((PlacementRule(("layers.3.*",), "streamed"), PlacementRule(("layers.0.*",), "cpu")))
    placements = replace(REQUEST, rules=rules).plan().plan.placements
    assert placements[3] is Placement.STREAMED
    assert placements[0] is Placement.CPU


def test_the_prediction_of_a_plan_depends_on_the_order_in_which_forward_uses_units() -> None:
    plan = REQUEST.plan().plan
    backwards = replace(REQUEST, uses=[partition.name for partition in reversed(LAYERS[0])])
    assert backwards.evaluate(plan).exposed_s > REQUEST.evaluate(plan).exposed_s
