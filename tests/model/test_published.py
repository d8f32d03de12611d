"""The published runs: their schedules, the rates that are fitted, and what these predict."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf_model.cli import validate as command
from perf_model.published.fit import TYPICAL, candidates, fit_rates
from perf_model.published.rates import Rates
from perf_model.published.runs import Run, RunsError, Setting, read_runs
from perf_model.published.schedules import artifact_schedule, placements_of, schedule_of, workload_of
from perf_model.published.validate import Validation, validate
from perf_model.schedule.check import check
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Workload
from tests.model.test_published_runs import PUBLISHED, ROW, text_of

SETTING = Setting(real_params=6 * 10**9, hidden=4096, ranks=4, cpu_ratio=1.0, sub_group_size=10**8, update_stride=None)
RATES = Rates(dram_bytes_per_s=60e9, pageable_bytes_per_s=4e9, link_bytes_per_s=48e9, gpu_adam_params_per_s=25e9)
STRIDES = (None, None, 2, 3, 4, 6, 10)


def measured(setting: Setting, rates: Rates, sweep: str = "s", noise: float = 1.0) -> Run:
    return Run(
        machine="m",
        sweep=sweep,
        model_name=f"{setting.real_params / 1e9:.0f}B",
        tp=1,
        dp=setting.ranks,
        setting=setting,
        measured_s=rates.update_s(setting) * noise,
    )


def sweep_of(rates: Rates, seed: int | None = None, **setting: float) -> list[Run]:
    """One sweep over strides; with a seed, 3% of noise."""
    its = replace(SETTING, **setting)  # type: ignore[arg-type]
    noises = np.ones(len(STRIDES)) if seed is None else np.exp(0.03 * np.random.default_rng(seed).normal(size=7))
    pairs = zip(STRIDES, noises, strict=True)
    return [measured(replace(its, update_stride=stride), rates, str(setting), float(noise)) for stride, noise in pairs]


# One worker of pytest-xdist makes the fixture, once.
pytestmark = pytest.mark.xdist_group("published runs")


@pytest.fixture(scope="module")
def published() -> list[Run]:
    return read_runs(PUBLISHED)


@pytest.fixture(scope="module")
def in_sweep(published: list[Run]) -> Validation:
    return validate(published, across_models=False)


@pytest.fixture(scope="module")
def across_models(published: list[Run]) -> Validation:
    return validate(published, across_models=True)


def test_the_original_interleaves_through_one_buffer() -> None:
    streamed, cpu, resident = Placement.STREAMED, Placement.CPU, Placement.RESIDENT
    schedule = artifact_schedule(Workload.of([5, 6, 7, 8, 9]), (cpu, streamed, cpu, streamed, resident))
    assert str(schedule).splitlines() == [
        "schedule slots 1 slot_numel 8 staging_bytes 128",
        "PREFETCH 1 slot 0",
        "CPU_STEP 0",
        "PUBLISH 0 after CPU_STEP 0",
        "GPU_STEP 1 slot 0 after PREFETCH 1",
        "FLUSH_STATES 1 slot 0 after GPU_STEP 1",
        "PREFETCH 3 slot 0 after FLUSH_STATES 1",
        "CPU_STEP 2",
        "PUBLISH 2 after CPU_STEP 2",
        "GPU_STEP 3 slot 0 after PREFETCH 3",
        "FLUSH_STATES 3 slot 0 after GPU_STEP 3",
        "GPU_STEP 4",
    ]


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        Setting,
        real_params=st.integers(1, 10**11),
        hidden=st.integers(1, 10**4),
        ranks=st.integers(1, 64),
        cpu_ratio=st.floats(0, 1),
        sub_group_size=st.integers(10**6, 10**10),
        update_stride=st.none() | st.integers(1, 20),
    )
)
def test_schedules_of_any_run_are_safe_and_place_as_told(setting: Setting) -> None:
    workload, schedule = workload_of(setting), schedule_of(setting)
    placements = check(schedule, workload)
    assert placements == placements_of(setting)
    offloaded = int(setting.cpu_ratio * len(workload.sub_groups))
    stride = setting.update_stride
    for index, placement in enumerate(placements):
        streamed = stride is not None and (index + 1) % stride == 0
        expected = Placement.STREAMED if streamed else Placement.CPU
        assert placement is (expected if index < offloaded else Placement.RESIDENT)


def test_sub_groups_hold_the_parameters_of_a_rank(published: list[Run]) -> None:
    for setting in {run.setting for run in published}:
        assert workload_of(setting).numel == pytest.approx(setting.real_params / setting.ranks, rel=1e-5)


def test_known_rates_are_found_where_the_runs_tell_them() -> None:
    stock = sweep_of(RATES)
    fit = fit_rates(stock)
    assert fit.names == ("dram_bytes_per_s", "pageable_bytes_per_s"), "what is hidden is not fitted"
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


def test_what_no_run_tells_stays_typical() -> None:
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
def test_there_are_never_more_rates_than_settings(its: list[Setting]) -> None:
    runs = [measured(setting, RATES) for setting in its]
    for names in candidates([*runs, *runs]):
        assert 1 <= len(names) <= len(set(its))
        assert len(set(names)) == len(names)


def test_a_sweep_is_fitted_on_its_stock_runs_and_two_strides() -> None:
    # Both orders, and two runs of the least stride: the first of them is fitted.
    runs = [*sweep_of(RATES)[::-1], measured(replace(SETTING, update_stride=2), RATES, "{}")]
    found = validate(runs, across_models=False)
    assert [each.fitted for each in found.predictions] == [True, False, False, False, True, True, True, False]
    assert [each.run for each in found.predictions] == runs
    assert found.groups[0].fit.settings == 3


def test_equal_strides_are_fitted_twice_at_most() -> None:
    stride_2 = replace(SETTING, update_stride=2)
    runs = [measured(replace(stride_2, cpu_ratio=ratio), RATES) for ratio in (0.5, 0.6, 0.7, 0.8)]
    assert [each.fitted for each in validate(runs, across_models=False).predictions] == [True, False, False, True]
    assert [each.fitted for each in validate(runs[:1], across_models=False).predictions] == [True]


def test_the_smaller_half_of_the_models_rounded_up_is_fitted() -> None:
    billions = (20, 7, 13)
    runs = [run for numel in billions for run in sweep_of(RATES, real_params=numel * 10**9)]
    found = validate(runs, across_models=True)
    assert len(found.groups) == 1
    assert {each.run.model_name for each in found.predictions if each.fitted} == {"7B", "13B"}
    assert {each.run.model_name for each in found.predictions if not each.fitted} == {"20B"}
    assert found.beside_line is None


@pytest.mark.parametrize(
    ("rates", "most"),
    [
        (RATES, 0.005),
        # Stride 2 is slower than 4.
        (replace(RATES, link_bytes_per_s=10e9), 0.01),
        (replace(RATES, dram_bytes_per_s=2e11, link_bytes_per_s=4e9), 0.01),
        (replace(RATES, dram_bytes_per_s=1e10, pageable_bytes_per_s=1e9, link_bytes_per_s=3e9), 0.03),
    ],
    ids=["host memory binds", "link binds", "link binds all strides", "slow machine"],
)
def test_what_the_simulation_made_is_predicted(rates: Rates, most: float) -> None:
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
    beside = validate(runs, across_models=False).beside_line
    assert beside is not None
    ours, line = beside
    assert ours.runs == line.runs == 3
    assert ours.median < line.median
    assert validate(runs[:5], across_models=False).beside_line is None
    mixed = [*runs[:5], measured(replace(SETTING, update_stride=6, cpu_ratio=0.5), RATES, "{}"), *runs[6:]]
    assert validate(mixed, across_models=False).beside_line is None


def test_a_line_is_straight_in_one_over_the_stride() -> None:
    runs = [
        replace(run, measured_s=1 + (1 / run.setting.update_stride if run.setting.update_stride else 2))
        for run in sweep_of(RATES)
    ]
    beside = validate(runs, across_models=False).beside_line
    assert beside is not None
    assert beside[1].p90 == pytest.approx(0, abs=1e-12)


def test_published_strides_are_predicted_better_than_by_a_line(in_sweep: Validation) -> None:
    assert in_sweep.beside_line is not None
    ours, line = in_sweep.beside_line
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
            its = [found.predictions[position] for position in group.positions]
            assert group.fit.settings == len({each.run.setting for each in its if each.fitted})
            assert len(group.fit.names) <= group.fit.settings


def test_published_sweeps_are_fitted_on_two_interleaved_runs(in_sweep: Validation) -> None:
    for group in in_sweep.groups:
        its = [in_sweep.predictions[position] for position in group.positions]
        interleaved = [each for each in its if each.run.setting.update_stride is not None]
        assert all(each.fitted for each in its if each not in interleaved)
        assert sum(each.fitted for each in interleaved) == min(2, len(interleaved))


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["validate", *arguments])


def run(*arguments: str) -> int:
    chosen = options(arguments)
    code: int = chosen.run(chosen)
    return code


def written(path: Path, *changes: dict[str, str]) -> str:
    path.write_text(text_of(*({**ROW, **change} for change in changes)))
    return str(path)


def test_the_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"update_stride": stride, "update_s": "1.2"} for stride in "234"]
    path = written(tmp_path / "runs.csv", {"interleaved": "0", "update_s": "2.1"}, *rows)
    assert run("--runs", path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"runs", "median_abs_rel_error", "p90_abs_rel_error"}
    assert [each["update_stride"] for each in found["runs"]] == [None, 2, 3, 4]
    assert [each["fitted"] for each in found["runs"]] == [True, True, False, True]
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
    assert run("--runs", written(tmp_path / "runs.csv", *rows)) == 0
    text = capsys.readouterr().out
    assert "strides, tp 1, dp 4" in text
    assert text.count("[b]13B") == 4
    assert text.count(" fitted") == 2
    assert "predicted runs (2): median" in text
    assert "a line in 1/stride, the baseline, there (2): median" in text


@pytest.mark.parametrize("more", [[], ["--across-models"]])
def test_nothing_to_predict_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    path = written(tmp_path / "runs.csv", {})
    assert run("--runs", path, "--json", *more) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["median_abs_rel_error"] is found["p90_abs_rel_error"] is None
    assert run("--runs", path, *more) == 0
    assert "Nothing was predicted" in capsys.readouterr().out


def test_the_command_refuses_bad_files() -> None:
    with pytest.raises(RunsError):
        run("--runs", "none.csv")


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
def test_any_file_that_is_read_is_predicted(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]], across: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    try:
        runs = read_runs(Path(written(path, *rows)))
    except RunsError:
        # Too many sub-groups; any single field is plausible.
        return
    found = validate(runs, across)
    assert all(np.isfinite(each.predicted_s) and each.predicted_s > 0 for each in found.predictions)
