"""Compare the presets with the published runs that they name."""

from __future__ import annotations

import pytest

from perf_model.prediction.cost import CostModel
from perf_model.prediction.hardware import HardwareProfile
from perf_model.prediction.simulate import simulate
from perf_model.presets.machines import ALIASES, MACHINES, find_machine
from perf_model.published.placements import placements_of, workload_of
from perf_model.published.runs import MeasuredRun, read_runs
from perf_model.published.update_rates import STREAMED_BYTES, link_bytes_per_s, update_s
from perf_model.schedule.lowering import serial_schedule
from perf_model.training_run.training_memory import PARAM_BYTES
from tests.model.test_published_runs import PUBLISHED


def predicted_s(run: MeasuredRun, profile: HardwareProfile) -> float:
    """Return the update: of stock as ``plan`` predicts it, and interleaved by the rates of the preset."""
    if run.setting.update_stride is None:
        schedule = serial_schedule(placements_of(run.setting))
        return simulate(schedule, workload_of(run.setting), CostModel.for_stock(profile, PARAM_BYTES)).end_s
    rates = {
        "dram_bytes_per_s": profile.rate("dram_update_bytes_per_s"),
        "pageable_bytes_per_s": profile.rate("pageable_h2d_bytes_per_s"),
        "streamed_bytes_per_param": STREAMED_BYTES,
        "gpu_adam_params_per_s": profile.rate("gpu_adam_params_per_s"),
    }
    return update_s(run.setting, rates, link_bytes_per_s(run.machine))


@pytest.mark.parametrize(("preset", "machine"), [("h100-pcie5", "4xH100-80GB"), ("a100-40gb", "4xA100-40GB")])
def test_a_preset_agrees_with_each_run_that_it_names_within_5_percent(preset: str, machine: str) -> None:
    assert machine in MACHINES[preset].source
    profile = MACHINES[preset].profile(ranks=4)
    runs = [run for run in read_runs(PUBLISHED) if run.machine == machine]
    assert {run.setting.update_stride is None for run in runs} == {True, False}
    for run in runs:
        assert predicted_s(run, profile) == pytest.approx(run.measured_s, rel=0.05), run


def test_aliases_name_presets() -> None:
    for alias, name in ALIASES.items():
        assert find_machine(alias) is MACHINES[name]
    assert find_machine("rtx4090") is MACHINES["rtx4090"]
    assert find_machine("unknown") is None
