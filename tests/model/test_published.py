"""Test the published runs: their schedules, the rates that are fitted to them, and the predictions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf_model.__main__ import main
from perf_model.published.fit import TYPICAL, candidates, fit_rates
from perf_model.published.rates import Rates
from perf_model.published.runs import MeasuredRun, RunsError, RunSetting, read_runs
from perf_model.published.schedules import artifact_schedule, placements_of, schedule_of, workload_of
from perf_model.published.validate import Validation, validate
from perf_model.schedule.check import check
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Workload
from tests.model.test_published_runs import PUBLISHED, ROW, text_of

SETTING = RunSetting(
    real_params=6 * 10**9, hidden=4096, ranks=4, cpu_ratio=1.0, sub_group_size=10**8, update_stride=None
)
RATES = Rates(dram_bytes_per_s=60e9, pageable_bytes_per_s=4e9, link_bytes_per_s=48e9, gpu_adam_params_per_s=25e9)
STRIDES = (None, None, 2, 3, 4, 6, 10)


def measured(setting: RunSetting, rates: Rates, sweep: str = "s", noise: float = 1.0) -> MeasuredRun:
    return MeasuredRun(
        machine="m",
        sweep=sweep,
        model_name=f"{setting.real_params / 1e9:.0f}B",
        tp=1,
        dp=setting.ranks,
        setting=setting,
        measured_s=rates.update_s(setting) * noise,
    )


def sweep_of(rates: Rates, seed: int | None = None, **setting: float) -> list[MeasuredRun]:
    """Return one sweep over strides; with a seed, the times have 3% of noise."""
    base = replace(SETTING, **setting)  # type: ignore[arg-type]
    noises = np.ones(len(STRIDES)) if seed is None else np.exp(0.03 * np.random.default_rng(seed).normal(size=7))
    pairs = zip(STRIDES, noises, strict=True)
    return [measured(replace(base, update_stride=stride), rates, str(setting), float(noise)) for stride, noise in pairs]


# Run on one worker of pytest-xdist, so that each fixture is made only once.
pytestmark = pytest.mark.xdist_group("published runs")


@pytest.fixture(scope="module")
def published() -> list[MeasuredRun]:
    return read_runs(PUBLISHED)


@pytest.fixture(scope="module")
def in_sweep(published: list[MeasuredRun]) -> Validation:
    return validate(published, across_models=False)


@pytest.fixture(scope="module")
def across_models(published: list[MeasuredRun]) -> Validation:
    return validate(published, across_models=True)


def test_the_artifact_streams_all_sub_groups_through_one_buffer() -> None:
    streamed, cpu, resident = Placement.STREAMED, Placement.CPU, Placement.RESIDENT
    schedule = artifact_schedule(Workload.from_numels([5, 6, 7, 8, 9]), (cpu, streamed, cpu, streamed, resident))
    assert str(schedule).splitlines() == [
        "schedule slots 1 slot_numel 8 staging_bytes 128",
        "PREFETCH 1 slot 0",
        "CPU_STEP 0",
        "PUBLISH 0 after CPU_STEP 0, PREFETCH 1",
        "GPU_STEP 1 slot 0 after PREFETCH 1, CPU_STEP 0",
        "FLUSH_STATES 1 slot 0 after GPU_STEP 1, CPU_STEP 0",
        "PREFETCH 3 slot 0 after FLUSH_STATES 1, CPU_STEP 0, PUBLISH 0",
        "CPU_STEP 2",
        "PUBLISH 2 after CPU_STEP 2, PREFETCH 3",
        "GPU_STEP 3 slot 0 after PREFETCH 3, CPU_STEP 2",
        "FLUSH_STATES 3 slot 0 after GPU_STEP 3, CPU_STEP 2",
        "GPU_STEP 4 after CPU_STEP 2",
    ]


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        RunSetting,
        real_params=st.integers(1, 10**11),
        hidden=st.integers(1, 10**4),
        ranks=st.integers(1, 64),
        cpu_ratio=st.floats(0, 1),
        sub_group_size=st.integers(10**6, 10**10),
        update_stride=st.none() | st.integers(1, 20),
    )
)
def test_the_schedule_of_any_run_is_safe_and_has_the_placements_of_its_setting(setting: RunSetting) -> None:
    workload, schedule = workload_of(setting), schedule_of(setting)
    placements = check(schedule, workload)
    assert placements == placements_of(setting)
    offloaded = int(setting.cpu_ratio * len(workload.units))
    stride = setting.update_stride
    for index, placement in enumerate(placements):
        streamed = stride is not None and (index + 1) % stride == 0
        expected = Placement.STREAMED if streamed else Placement.CPU
        assert placement is (expected if index < offloaded else Placement.RESIDENT)


def test_sub_groups_hold_the_parameters_of_a_rank(published: list[MeasuredRun]) -> None:
    for setting in {run.setting for run in published}:
        assert workload_of(setting).numel == pytest.approx(setting.real_params / setting.ranks, rel=1e-5)


def test_known_rates_are_found_where_the_runs_determine_them() -> None:
    stock = sweep_of(RATES)
    fit = fit_rates(stock)
    assert fit.names == ("dram_bytes_per_s", "pageable_bytes_per_s"), "rates of hidden transfers are not fitted"
    assert fit.rates.dram_bytes_per_s == pytest.approx(60e9, rel=0.03)
    assert fit.rates.pageable_bytes_per_s == pytest.approx(4e9, rel=0.1)

    slow = replace(RATES, link_bytes_per_s=8e9)
    fit = fit_rates(sweep_of(slow))
    assert fit.names == ("dram_bytes_per_s", "pageable_bytes_per_s", "link_bytes_per_s")
    assert fit.rates.link_bytes_per_s == pytest.approx(8e9, rel=0.05)

    slow = replace(RATES, gpu_adam_params_per_s=2e9)
    fit = fit_rates([*sweep_of(slow, cpu_ratio=0.5), *sweep_of(slow, cpu_ratio=0.8), *sweep_of(slow)])
    assert "gpu_adam_params_per_s" in fit.names
    assert fit.rates.gpu_adam_params_per_s == pytest.approx(2e9, rel=0.1)


def test_rates_that_no_run_determines_stay_typical() -> None:
    fit = fit_rates([measured(SETTING, RATES)])
    assert fit.names == ("dram_bytes_per_s",)
    assert replace(fit.rates, dram_bytes_per_s=TYPICAL.dram_bytes_per_s) == TYPICAL


SETTINGS = st.builds(
    replace,
    st.just(SETTING),
    cpu_ratio=st.sampled_from([0.5, 1.0]),
    update_stride=st.sampled_from([None, 2, 5]),
    real_params=st.sampled_from([6 * 10**9, 7 * 10**9]),
)


@given(st.lists(SETTINGS, min_size=1, max_size=6))
def test_there_are_never_more_rates_than_settings(drawn: list[RunSetting]) -> None:
    runs = [measured(setting, RATES) for setting in drawn]
    for names in candidates([*runs, *runs]):
        assert 1 <= len(names) <= len(set(drawn))
        assert len(set(names)) == len(names)


def test_a_sweep_is_fitted_on_its_stock_runs_and_two_strides() -> None:
    # The strides are in descending order, and there are two runs of the least stride: the first of them is fitted.
    runs = [*sweep_of(RATES)[::-1], measured(replace(SETTING, update_stride=2), RATES, "{}")]
    found = validate(runs, across_models=False)
    assert [prediction.fitted for prediction in found.predictions] == [
        True,
        False,
        False,
        False,
        True,
        True,
        True,
        False,
    ]
    assert [prediction.run for prediction in found.predictions] == runs
    assert found.groups[0].fit.settings == 3


def test_equal_strides_are_fitted_twice_at_most() -> None:
    stride_2 = replace(SETTING, update_stride=2)
    runs = [measured(replace(stride_2, cpu_ratio=ratio), RATES) for ratio in (0.5, 0.6, 0.7, 0.8)]
    assert [prediction.fitted for prediction in validate(runs, across_models=False).predictions] == [
        True,
        False,
        False,
        True,
    ]
    assert [prediction.fitted for prediction in validate(runs[:1], across_models=False).predictions] == [True]


def test_the_smaller_half_of_the_models_rounded_up_is_fitted() -> None:
    billions = (20, 7, 13)
    runs = [run for numel in billions for run in sweep_of(RATES, real_params=numel * 10**9)]
    found = validate(runs, across_models=True)
    assert len(found.groups) == 1
    assert {prediction.run.model_name for prediction in found.predictions if prediction.fitted} == {"7B", "13B"}
    assert {prediction.run.model_name for prediction in found.predictions if not prediction.fitted} == {"20B"}
    assert found.compared_with_line is None


@pytest.mark.parametrize(
    ("rates", "most"),
    [
        (RATES, 0.005),
        # With this link, stride 2 is slower than stride 4.
        (replace(RATES, link_bytes_per_s=10e9), 0.01),
        (replace(RATES, dram_bytes_per_s=2e11, link_bytes_per_s=4e9), 0.01),
        (replace(RATES, dram_bytes_per_s=1e10, pageable_bytes_per_s=1e9, link_bytes_per_s=3e9), 0.03),
    ],
    ids=["host memory binds", "link binds", "link binds all strides", "slow machine"],
)
def test_runs_that_the_simulation_made_are_predicted(rates: Rates, most: float) -> None:
    errors = validate(sweep_of(rates), across_models=False).errors
    assert errors is not None
    assert errors.p90 < most

    noisy = [
        run for seed, numel in enumerate((7, 9, 13, 20)) for run in sweep_of(rates, seed, real_params=numel * 10**9)
    ]
    for across in (False, True):
        errors = validate(noisy, across).errors
        assert errors is not None
        assert errors.median < 0.05
        assert errors.p90 < 0.1


def test_a_line_needs_four_strides_of_one_model() -> None:
    runs = sweep_of(RATES)
    compared = validate(runs, across_models=False).compared_with_line
    assert compared is not None
    ours, line = compared
    assert ours.runs == line.runs == 3
    assert ours.median < line.median
    assert validate(runs[:5], across_models=False).compared_with_line is None
    mixed = [*runs[:5], measured(replace(SETTING, update_stride=6, cpu_ratio=0.5), RATES, "{}"), *runs[6:]]
    assert validate(mixed, across_models=False).compared_with_line is None


def test_a_line_is_straight_in_one_over_the_stride() -> None:
    runs = [
        replace(run, measured_s=1 + (1 / run.setting.update_stride if run.setting.update_stride else 2))
        for run in sweep_of(RATES)
    ]
    compared = validate(runs, across_models=False).compared_with_line
    assert compared is not None
    assert compared[1].p90 == pytest.approx(0, abs=1e-12)


def test_published_strides_are_predicted_better_than_by_a_line(in_sweep: Validation) -> None:
    assert in_sweep.compared_with_line is not None
    ours, line = in_sweep.compared_with_line
    assert ours.runs == line.runs == 16
    assert ours.median < line.median
    assert ours.p90 < line.p90
    assert in_sweep.errors is not None
    assert in_sweep.errors.median < 0.04
    assert in_sweep.errors.p90 < 0.1


def test_published_larger_models_are_predicted_from_smaller_ones(across_models: Validation) -> None:
    assert across_models.errors is not None
    assert across_models.errors.runs == 60
    assert across_models.errors.median <= 0.08
    assert across_models.errors.p90 <= 0.20


def test_published_groups_have_no_more_rates_than_settings(in_sweep: Validation, across_models: Validation) -> None:
    for found in (in_sweep, across_models):
        for group in found.groups:
            predictions = [found.predictions[position] for position in group.positions]
            fitted = {prediction.run.setting for prediction in predictions if prediction.fitted}
            assert group.fit.settings == len(fitted)
            assert len(group.fit.names) <= group.fit.settings


def test_published_sweeps_are_fitted_on_two_interleaved_runs(in_sweep: Validation) -> None:
    for group in in_sweep.groups:
        predictions = [in_sweep.predictions[position] for position in group.positions]
        interleaved = [prediction for prediction in predictions if prediction.run.setting.update_stride is not None]
        assert all(prediction.fitted for prediction in predictions if prediction not in interleaved)
        assert sum(prediction.fitted for prediction in interleaved) == min(2, len(interleaved))


def validate_command(*arguments: str) -> int:
    return main(["validate", *arguments])


def written(path: Path, *changes: dict[str, str]) -> str:
    path.write_text(text_of(*({**ROW, **change} for change in changes)))
    return str(path)


def test_the_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"update_stride": stride, "update_s": "1.2"} for stride in "234"]
    path = written(tmp_path / "runs.csv", {"interleaved": "0", "update_s": "2.1"}, *rows)
    assert validate_command("--runs", path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"runs", "median_abs_rel_error", "p90_abs_rel_error"}
    assert [run["update_stride"] for run in found["runs"]] == [None, 2, 3, 4]
    assert [run["fitted"] for run in found["runs"]] == [True, True, False, True]
    assert set(found["runs"][0]) == {
        "sweep",
        "model_name",
        "update_stride",
        "measured_s",
        "predicted_s",
        "fitted",
    }
    only = found["runs"][2]
    error = abs(only["predicted_s"] / only["measured_s"] - 1)
    assert found["median_abs_rel_error"] == found["p90_abs_rel_error"] == pytest.approx(error)


def test_the_command_prints_each_run_and_the_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"update_stride": stride, "model_name": "[b]13B", "update_s": "1.2"} for stride in "2345"]
    assert validate_command("--runs", written(tmp_path / "runs.csv", *rows)) == 0
    text = capsys.readouterr().out
    assert "strides, tp 1, dp 4" in text
    assert text.count("[b]13B") == 4
    assert text.count(" fitted") == 2
    assert "predicted runs (2): median" in text
    assert "the baseline there, a line in 1/stride (2): median" in text


@pytest.mark.parametrize("more", [[], ["--across-models"]])
def test_the_command_reports_that_nothing_was_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    path = written(tmp_path / "runs.csv", {})
    assert validate_command("--runs", path, "--json", *more) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["median_abs_rel_error"] is found["p90_abs_rel_error"] is None
    assert validate_command("--runs", path, *more) == 0
    assert "Nothing was predicted" in capsys.readouterr().out


def test_the_command_refuses_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert validate_command("--runs", "none.csv") == 2
    assert capsys.readouterr().err.startswith("--runs: must be a readable file, found 'none.csv'")


@settings(max_examples=10, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "real_params": st.sampled_from(["1", "1e9", "1e13"]),
                "dp": st.sampled_from(["1", "1e6"]),
                "hidden": st.sampled_from(["1", "1e4"]),
                "cpu_ratio": st.sampled_from(["0", "0.5", "1"]),
                "interleaved": st.sampled_from(["0", "1"]),
                "update_stride": st.sampled_from(["1", "3", "1e6"]),
                "sub_group_size": st.sampled_from(["1e8", "1e15"]),
                "update_s": st.sampled_from(["1e-6", "1", "1e6"]),
            }
        ),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
)
def test_the_runs_of_any_file_that_is_read_are_predicted(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]], across: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    try:
        runs = read_runs(Path(written(path, *rows)))
    except RunsError:
        # There are too many sub-groups in all; each single field is plausible.
        return
    found = validate(runs, across)
    assert all(np.isfinite(prediction.predicted_s) and prediction.predicted_s > 0 for prediction in found.predictions)
