"""Check that a training engine that knows the same plans as ``plan`` does, and predicts the same seconds."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from deep_opt_states.report.record import PredictedUpdate
from perf_model.__main__ import main
from perf_model.prediction.hardware import HardwareProfile
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.slowdown import Slowdown
from perf_model.presets.machines import MACHINES
from perf_model.presets.models import MODELS
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.training_run.job import Job
from perf_model.training_run.training_memory import TrainingMemory
from tests.tiers import thorough
from tests.zero.planning.planning_in_training import TrainingRun

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
            # How much host memory training has for eager units depends on the machine that trains.
            "eager-memory-gb": 0,
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
QUICK = 5
"""How many settings ``make test`` compares: of four machines, of one and several ranks."""


def run_of(setting: PlanSetting, printed: dict[str, Any]) -> TrainingRun:
    """Return the training run with the printed config, whose first steps measure what ``plan`` assumes."""
    model, job, windows = MODELS[setting.model], setting.job, dict(printed["windows"])
    slowdown = Slowdown(cpu=windows.pop("cpu_slowdown"))
    assert setting.profile.gpu_memory_bytes is not None
    return TrainingRun(
        parameters=model.parameters(),
        ranks=setting.world_size,
        config=printed["deepspeed_config"],
        profile=setting.profile,
        uses=model.uses(),
        windows=Windows(**windows, slowdown=slowdown),
        free_bytes=setting.profile.gpu_memory_bytes - TrainingMemory(job).gpu_bytes - TrainingMemory(job).cache_bytes,
    )


def print_plan(setting: PlanSetting, *options: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([*setting.arguments, *options]) == 0
    return printed.getvalue()


def assert_equals_printed(plan: UpdatePlan, predicted: PredictedUpdate, printed: dict[str, Any]) -> None:
    decisions = printed["plan"]
    assert plan.fingerprint == decisions["fingerprint"]
    assert [placement.value for placement in plan.placements] == decisions["placements"]
    assert plan.num_slots == decisions["num_slots"]
    assert plan.order is not None
    assert list(plan.order) == decisions["order"]
    assert predicted.exposed_s == printed["predicted"]["exposed_update_s"], "equal, not only near"
    assert predicted.timeline.active_s == printed["predicted"]["update_s"]


@pytest.mark.promise("P5")
@pytest.mark.parametrize("setting", [*SETTINGS[:QUICK], *map(thorough, SETTINGS[QUICK:])], ids=str)
def test_the_engine_finds_the_printed_plan_with_the_printed_seconds(setting: PlanSetting, tmp_path: Path) -> None:
    printed = json.loads(print_plan(setting))
    plan, predicted = run_of(setting, printed).plan(tmp_path)
    assert_equals_printed(plan, predicted, printed)
    # With DeepSpeed's default sub-groups of 1e9 parameters, the first versions left nearly everything on the CPU.
    assert plan.numel(Placement.CPU) <= 0.6 * plan.workload.numel
    assert predicted.exposed_s <= 0.5 * printed["baselines"]["all_cpu"]["exposed_update_s"]


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
def test_the_engine_finds_the_printed_plan_with_options_that_the_config_has(
    options: dict[str, float], tmp_path: Path
) -> None:
    arguments = [text for key, value in options.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    printed = json.loads(print_plan(SETTINGS[0], *arguments))
    block = printed["deepspeed_config"]["deep_optimizer_states"]
    assert block.keys() & {"unit_size", "gpu_memory_gb", "gpu_memory_margin_gb"} == options.keys()
    assert_equals_printed(*run_of(SETTINGS[0], printed).plan(tmp_path), printed)


@pytest.mark.parametrize("changed", ["windows", "uses", "free_bytes", "parameters"])
def test_the_plan_of_the_engine_depends_on_all_that_it_measures(changed: str, tmp_path: Path) -> None:
    setting = SETTINGS[12]
    printed = json.loads(print_plan(setting))
    run = run_of(setting, printed)
    other: dict[str, Any] = {
        "windows": Windows(backward_s=run.windows.backward_s * 4, forward_s=run.windows.forward_s * 4),
        "uses": run.uses[::-1],
        "free_bytes": run.free_bytes // 2,
        "parameters": [(name, numel + 4096) for name, numel in run.parameters],
    }
    plan, predicted = replace(run, **{changed: other[changed]}).plan(tmp_path)
    assert (plan.fingerprint, plan.order) != (printed["plan"]["fingerprint"], tuple(printed["plan"]["order"]))
    assert predicted.exposed_s != printed["predicted"]["exposed_update_s"]


def test_the_settings_are_of_different_machines_models_ranks_and_micro_batches() -> None:
    assert len(set(SETTINGS)) == 20
    for key, least in {"machine": 4, "model": 7, "world_size": 4, "micro_batch": 3}.items():
        assert len({getattr(setting, key) for setting in SETTINGS}) >= least, key
