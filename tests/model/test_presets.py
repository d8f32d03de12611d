"""Check the presets of models and machines: sizes that their authors state, and published runs."""

from __future__ import annotations

import pytest

from benchmarks.published.runs import MeasuredRun, read_runs
from benchmarks.published.updates import (
    STREAMED_BYTES,
    link_bytes_per_s,
    placements_of,
    priors_of,
    update_s,
    workload_of,
)
from perf_model.prediction.cost import CostModel
from perf_model.prediction.hardware import HardwareProfile
from perf_model.prediction.simulate import simulate
from perf_model.presets.machines import MACHINES
from perf_model.presets.models import MODELS
from perf_model.schedule.lowering import serial_schedule

STATED = {
    **{"Llama-2-7B": 6_738_415_616, "Llama-3-8B": 8_030_261_248, "Llama-3-70B": 70_553_706_496},
    **{"Mistral-7B": 7_241_732_096, "Qwen2.5-7B": 7_615_616_512, "Qwen2.5-14B": 14_770_033_664},
    **{"Qwen2.5-32B": 32_763_876_352, "Qwen3-4B": 4_022_468_096, "Qwen3-8B": 8_190_735_360},
    **{"Qwen3-30B-A3B": 30_532_122_624, "Gemma-2-9B": 9_241_705_984},
}

PAPER = {"7B": 5.92e9, "8.3B": 9.14e9, "10B": 9.92e9, "13B": 11.25e9, "20B": 15.33e9}


def test_models_have_the_parameters_that_their_authors_state() -> None:
    assert {name: MODELS[name].numel for name in STATED} == STATED
    assert {name: MODELS[name].numel for name in PAPER} == pytest.approx(PAPER, rel=1e-3)
    active = {name: shape.active_numel for name, shape in MODELS.items() if shape.active_numel != shape.numel}
    assert active == pytest.approx({"Qwen3-30B-A3B": 3.35e9}, rel=0.01), "only the experts of a token"


@pytest.mark.parametrize("name", MACHINES)
def test_machines_are_marked_as_not_measured_and_divide_shared_rates(name: str) -> None:
    alone, four = (MACHINES[name].profile(ranks) for ranks in (1, 4))
    assert alone.provenance.source.startswith("PRESET, not a measurement of your machine")
    for shared in ("cpu_adam_params_per_s", "dram_update_bytes_per_s"):
        assert four.rate(shared) == pytest.approx(alone.rate(shared) / 4)
    for own in ("h2d_bytes_per_s", "gpu_adam_params_per_s", "matmul_flops_per_s", "inter_node_bytes_per_s"):
        assert four.rate(own) == alone.rate(own)


def predicted_s(run: MeasuredRun, profile: HardwareProfile) -> float:
    """Return the update: of stock as ``plan`` predicts it, and interleaved by the rates of the preset."""
    if run.setting.update_stride is None:
        schedule = serial_schedule(placements_of(run.setting))
        return simulate(schedule, workload_of(run.setting), CostModel.for_stock(profile)).end_s
    rates = {
        "dram_bytes_per_s": profile.rate("dram_update_bytes_per_s"),
        "pageable_bytes_per_s": profile.rate("pageable_h2d_bytes_per_s"),
        "streamed_bytes_per_param": STREAMED_BYTES,
        "gpu_adam_params_per_s": priors_of(run.machine)["gpu_adam_params_per_s"].median,
    }
    return update_s(run.setting, rates, link_bytes_per_s(run.machine))


@pytest.mark.parametrize(("preset", "machine"), [("h100-pcie5", "4xH100-80GB"), ("a100-40gb", "4xA100-40GB")])
def test_a_preset_agrees_with_each_run_that_it_names_within_5_percent(preset: str, machine: str) -> None:
    assert machine in MACHINES[preset].source
    profile = MACHINES[preset].profile(ranks=4)
    runs = [run for run in read_runs() if run.machine == machine]
    assert {run.setting.update_stride is None for run in runs} == {True, False}
    for run in runs:
        assert predicted_s(run, profile) == pytest.approx(run.measured_s["update"], rel=0.05), run
