"""Check hardware profiles: JSON in and out, and the refusal of implausible values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perf_model.prediction.hardware import (
    QUANTITIES,
    REQUIRED,
    RETIRED_QUANTITIES,
    HardwareProfile,
    Measurement,
    ProfileError,
    Provenance,
)
from perf_model.training_run.micro_batch import MatrixRate
from tests.model.profiles import RATES, profile


def test_written_profile_is_read_as_the_same_profile(tmp_path: Path) -> None:
    written = profile()
    path = tmp_path / "profile.json"
    path.write_text(written.to_json())
    assert HardwareProfile.read(path) == written
    assert json.loads(path.read_text())["version"] == 2


def test_profile_gives_medians_and_spreads_and_refuses_a_waived_rate_that_is_needed() -> None:
    measurement = Measurement(samples=(5.0, 1.0, 2.0, 4.0, 3.0, 100.0))
    assert measurement.median == 3.5
    assert measurement.spread == (2.0, 5.0)
    without = profile({**RATES, "gpu_adam_params_per_s": None})
    assert profile().has_accelerator
    assert without.has_accelerator
    assert without.get("gpu_adam_params_per_s") is None
    with pytest.raises(ProfileError, match=r"gpu_adam_params_per_s: is needed to predict the update, found nothing"):
        without.rate("gpu_adam_params_per_s")
    with pytest.raises(ProfileError, match=r"matmul_flops_per_s: is needed to predict forward .*not in the profile"):
        MatrixRate.from_profile(profile())


@pytest.mark.parametrize("name", sorted(RETIRED_QUANTITIES))
def test_a_saved_profile_with_a_retired_quantity_is_still_read(name: str) -> None:
    saved = json.loads(profile().to_json())
    saved["measurements"][name] = {"samples": [9e9]}
    assert HardwareProfile.from_json(json.dumps(saved)) == profile()


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_rates_are_refused(name: str, value: float) -> None:
    with pytest.raises(ProfileError, match=rf"{name}: must be from .*, found"):
        profile({**RATES, name: value})


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_units_that_are_wrong_by_a_thousand_are_refused(name: str, factor: float) -> None:
    with pytest.raises(ProfileError, match=f"{name}: must be from") as caught:
        profile({**RATES, name: RATES[name] * factor})
    assert QUANTITIES[name].meaning in str(caught.value)


def test_a_rate_of_both_directions_above_their_sum_is_refused() -> None:
    with pytest.raises(ProfileError, match="both_bytes_per_s: cannot exceed h2d_bytes_per_s plus d2h_bytes_per_s"):
        profile({**RATES, "both_bytes_per_s": 100e9})


def raw(**changes: Any) -> str:
    """Return a profile as JSON with these changes; a value of ``"missing"`` removes the key."""
    value = {**json.loads(profile().to_json()), **changes}
    return json.dumps({key: entry for key, entry in value.items() if entry != "missing"})


def with_rate(name: str, rate: float, **changes: Any) -> str:
    """Return a profile as JSON in which the quantity ``name`` has one sample."""
    measurements = json.loads(profile().to_json())["measurements"]
    return raw(measurements={**measurements, name: {"samples": [rate]}}, **changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "A profile must be JSON, found other text"),
        ("[1]", r"version: must be the integer 2, found \[1\]"),
        ('{"model_type": "llama"}', "version: must be the integer 2, found nothing"),
        (raw(version=1), "version: must be the integer 2, found 1"),
        (raw(measurements="missing"), "profile: must be as the program writes it, found KeyError: 'measurements'"),
        (raw(measurements={}), r"cpu_adam_params_per_s: is needed for every prediction, found nothing"),
        (raw(measurements={"speed": {"samples": [1]}}), "measurements: must only have the keys .*, found speed"),
        (raw(measurements={"h2d_bytes_per_s": 3}), "profile: must be as the program writes it, found TypeError"),
        (
            raw(measurements={"h2d_bytes_per_s": {"samples": ["fast"]}}),
            "profile: must be as .*, found ValueError: .*fast",
        ),
        (raw(speed=3), "profile: must be as the program writes it, found TypeError: .*'speed'"),
        *((raw(gpu_memory_bytes=value), r"gpu_memory_bytes: must be from 1e\+09") for value in (-1, 80)),
        *((raw(host_memory_bytes=value), r"host_memory_bytes: must be from 1e\+09") for value in (64, 10**400)),
        (raw(gpu_peak_flops=989), r"gpu_peak_flops: must be from 1e\+12"),
        (raw(gpu_peak_flops="1e15"), "profile: must be as the program writes it, found TypeError"),
        (raw(provenance={}), "profile: must be as the program writes it, found TypeError: .*'source'"),
        (raw(provenance={"colour": "red"}), "profile: must be as the program writes it, found TypeError: .*'colour'"),
        (raw(cpu_adam_by_threads={"two": {"samples": [1e9]}}), "profile: must be as .*, found ValueError: .*'two'"),
        (raw(cpu_adam_by_threads={"2": {"samples": [1]}}), "cpu_adam_by_threads.2: must be from"),
        (with_rate("matmul_flops_per_s", 6e11), "matmul_flops_per_s: must be from 1e.12 to 1e.17 on this GPU"),
        (
            with_rate("matmul_flops_per_s", 1.2e15, gpu_peak_flops=989e12),
            r"matmul_flops_per_s: must be from 1e\+12 to 1.19e\+15 on this GPU, 1.2 times gpu_peak_flops .*, found 12",
        ),
        (with_rate("gpu_adam_params_per_s", 1e8), "gpu_adam_params_per_s: must be from"),
        (
            with_rate("cpu_adam_beside_transfers_params_per_s", 5e9),
            "cpu_adam_beside_transfers_params_per_s: cannot exceed cpu_adam_params_per_s",
        ),
        (
            with_rate("both_beside_cpu_adam_bytes_per_s", 7e10),
            "both_beside_cpu_adam_bytes_per_s: cannot exceed both_bytes_per_s",
        ),
    ],
)
def test_a_bad_profile_is_refused_with_rule_value_and_remedy(text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message) as caught:
        HardwareProfile.from_json(text)
    assert len(str(caught.value).splitlines()) >= 2, "the remedy"


def test_a_cpu_with_the_matmul_rate_of_a_gpu_is_refused() -> None:
    host = {name: RATES[name] for name in REQUIRED}
    fields = {"name": "cpu", "provenance": Provenance(source="made up for a test")}

    def with_flops(flops: float) -> HardwareProfile:
        rates = {**host, "matmul_flops_per_s": flops}
        return HardwareProfile(
            **fields, measurements={name: Measurement(samples=(rate,)) for name, rate in rates.items()}
        )

    assert not with_flops(2e11).has_accelerator
    with pytest.raises(ProfileError, match=r"matmul_flops_per_s: must be from 1e\+08 to 2e\+14 on this CPU"):
        with_flops(1e15)


def test_a_profile_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(profile().to_json(), encoding="utf-8-sig")
    assert HardwareProfile.read(path) == profile()


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none", tmp_path, tmp_path / "binary", Path("\0"), Path("long" * 1000)):
        with pytest.raises(ProfileError, match="must be a readable file"):
            HardwareProfile.read(path)
