"""Test that a program can rebuild a plan and its prediction from the output of ``plan --json`` alone."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deep_opt_states import __version__
from perf_model.cli.plan_json import FORMAT
from perf_model.prediction.cost import CostModel
from perf_model.prediction.hardware import HardwareProfile
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import Simulator
from perf_model.prediction.slowdown import Slowdown
from perf_model.schedule.host_layout import SIXTEEN_BIT
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.rules import NO_RULES, PlacementRules
from perf_model.schedule.workload import Range, Unit, Workload
from perf_model.training_run.forecast import Forecast, MemoryLimits, Overlap
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import Overheads
from perf_model.training_run.model import ModelShape, ParameterShape, SharedLayers
from tests.cli.planning import LLAMA, job, planned
from tests.model.profiles import RATES, profile

UNMEASURED = profile({**RATES, "matmul_flops_per_s": 3e14, "dram_copy_bytes_per_s": None})
MEASURED = replace(UNMEASURED, provenance=replace(UNMEASURED.provenance, source="measured", host="a", ranks=4))
"""A profile with samples, a waived rate and the CPU's Adam by threads, as ``profile`` writes it."""

RULES = [{"match": "*.mlp.*", "states": "cpu"}, {"match": "*", "states": "planned"}]


WITH_OPTIONS: dict[str, list[str]] = {
    "preset": job("gh200", "13B", world_size=1, ranks_per_node=1),
    "offloaded parameters": [*job(gpu_memory_gb=40), "--offload-param", "--no-recompute"],
    "tensor parallel": job(gpu_memory_gb=40, tensor_parallel=2, attention="eager"),
}


@pytest.fixture(params=[*WITH_OPTIONS, "measured", "shared layers", "config, rules and options"])
def printed(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    if request.param in WITH_OPTIONS:
        return planned(WITH_OPTIONS[request.param])
    if request.param == "measured":
        machine = tmp_path / "profile.json"
        machine.write_text(MEASURED.to_json())
        found = planned(job(machine, "7B", gpu_memory_gb=30))
        machine.unlink()
        return found
    if request.param == "shared layers":
        shared = {"share_layers": "model.layers", "every": 4, "gpu_memory_gb": 20}
        return planned(job("gh200", "13B", world_size=1, ranks_per_node=1, **shared))
    config, rules = tmp_path / "config.json", tmp_path / "rules.json"
    config.write_text(json.dumps({**LLAMA, "num_hidden_layers": 8}))
    rules.write_text(json.dumps(RULES))
    options: dict[str, Any] = {
        "gpu_memory_gb": 20,
        "rules": rules,
        "accumulation": 4,
        "overlap": "backward",
        "unit_size": 50_000_000,
    }
    found = planned(job(model=config, world_size=2, trainable_share=0.5, pinned_memory_gb=60, **options))
    # The output alone is enough.
    config.unlink()
    rules.unlink()
    return found


def shape_of(model: dict[str, Any]) -> ModelShape:
    shape = dict(model["shape"])
    tensors = tuple(ParameterShape(*tensor) for tensor in shape.pop("tensors"))
    tied, shared = tuple(map(tuple, shape.pop("tied"))), shape.pop("shared")
    return ModelShape(tensors=tensors, tied=tied, shared=None if shared is None else SharedLayers(**shared), **shape)


def rebuild(inputs: dict[str, Any]) -> Forecast:
    rules = PlacementRules.from_json(inputs["rules"]) if inputs["rules"] else NO_RULES
    return Forecast(
        Job(shape=shape_of(inputs["model"]), rules=rules, **inputs["job"]),
        HardwareProfile.from_json(json.dumps(inputs["machine"])),
        MemoryLimits(**inputs["limits"]),
        Overlap(**inputs["overlap"]),
        inputs["unit_sizes"],
        Overheads(**inputs["overheads"]),
    )


def test_the_inputs_lead_to_the_same_plan_and_seconds(printed: dict[str, Any]) -> None:
    found = rebuild(printed["inputs"])
    assert found.chosen.to_json_dict() == printed["plan"]
    for name, outcome in {"predicted": found.predicted, **found.baselines}.items():
        written = printed["predicted"] if name == "predicted" else printed["baselines"][name]
        assert getattr(outcome, "iteration_s", None) == written["iteration_s"], name
    assert printed["inputs"]["model"]["numel"] == found.job.shape.numel


def test_the_units_placements_order_and_slots_give_the_same_plan_and_exposed_seconds(printed: dict[str, Any]) -> None:
    units = printed["units"]
    workload = Workload(
        tuple(
            Unit(
                unit["index"],
                tuple(Range(*run) for run in unit["ranges"]),
                unit["label"],
                used_numel=unit["forward_numel"],
            )
            for unit in units
        )
    )
    plan = UpdatePlan(
        workload=workload,
        placements=tuple(Placement(unit["placement"]) for unit in units),
        num_slots=printed["num_slots"],
        order=tuple(printed["order"]["update"]),
        eager=frozenset(unit["index"] for unit in units if unit["eager"]),
    )
    assert plan.fingerprint == printed["plan"]["fingerprint"]
    inputs = printed["inputs"]
    machine = HardwareProfile.from_json(json.dumps(inputs["machine"]))
    cost = CostModel.from_profile(machine, replace(SIXTEEN_BIT, publishes=not inputs["job"]["offload_param"]))
    slowdown = Slowdown(cpu=printed["windows"].pop("cpu_slowdown"))
    windows = Windows(**printed["windows"], first_use=tuple(printed["order"]["first_use"]), slowdown=slowdown)
    timeline = Simulator(cost, windows).run(plan.schedule, workload)
    assert windows.exposed_s(timeline, workload, cost) == printed["predicted"]["exposed_update_s"]
    assert printed["unit_size"] >= max(unit["numel"] for unit in units)


def test_the_versions_are_those_of_the_program_and_the_inputs_those_of_the_options(
    printed: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Check that each option is in the output, because a rebuilt plan could be equal without it."""
    assert printed["versions"] == {
        "format": FORMAT,
        "deep_opt_states": __version__,
        "python": platform.python_version(),
    }
    block = printed["deepspeed_config"]["deep_optimizer_states"]
    assert set(printed["inputs"]["given"]) == block.keys() & {"unit_size", "gpu_memory_gb"}
    found, name = printed["inputs"]["job"], request.node.callspec.params["printed"]
    assert found["offload_param"] is (name == "offloaded parameters")
    assert found["tensor_parallel"] == (2 if name == "tensor parallel" else 1)
    machine = printed["inputs"]["machine"]
    assert (machine["provenance"]["source"] == "measured") is (name == "measured")
