"""Test the cache of quick profiles: it saves time and never makes a run fail."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deep_opt_states.files import replace_file
from deep_opt_states.profiler import cache
from deep_opt_states.profiler.cache import cached_path, quick_profile
from deep_opt_states.profiler.probes import ProbeError
from deep_opt_states.profiler.profile import NO_ACCELERATOR, noise_waivers
from deep_opt_states.profiler.ranks import Ranks
from perf_model.prediction.hardware import REQUIRED, HardwareProfile, Measurement, ProfileError, Provenance
from tests.launch import run_ranks
from tests.model.profiles import profile
from tests.profiler.threads import on_ranks


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "deep_opt_states"


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of the ranks that measured.

    Each measurement returns another rate: 1e9 + n, where n is the number of rank 0's measurements.
    """
    ranks_that_measured: list[int] = []
    calls: dict[int, int] = {}

    def measure(device: Any, ranks: Ranks, effort: Any, **kernels: Any) -> HardwareProfile:
        ranks_that_measured.append(ranks.rank)
        calls[ranks.rank] = calls.get(ranks.rank, 0) + 1
        rate = ranks.gather(1e9 + calls[ranks.rank])[0]
        return HardwareProfile(
            name="here",
            provenance=Provenance(source="measured", date="2026-01-02"),
            measurements={name: Measurement(samples=(rate,)) for name in REQUIRED},
        )

    monkeypatch.setattr(cache, "measure", measure)
    return ranks_that_measured


def profile_and_log(ranks: Ranks) -> tuple[float, list[str]]:
    log: list[str] = []
    return quick_profile(None, ranks, log.append, log.append, threads=1).rate("cpu_adam_params_per_s"), log


def test_a_cached_profile_is_read_instead_of_measuring(folder: Path, measured: list[int]) -> None:
    assert profile_and_log(Ranks()) == (1e9 + 1, ["A quick hardware profile was measured."])
    (file,) = folder.iterdir()
    assert profile_and_log(Ranks()) == (1e9 + 1, [f"Hardware profile of 2026-01-02, read from {file}."])
    assert measured == [0]


def test_the_machine_is_measured_again_after_triton_was_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the GPU's Adam, which is waived without Triton, is not waived forever."""
    monkeypatch.setattr(cache, "triton_version", lambda: "")
    profile_and_log(Ranks())
    monkeypatch.setattr(cache, "triton_version", lambda: "3.6.0")
    assert profile_and_log(Ranks())[0] == 1e9 + 2
    assert len(list(folder.iterdir())) == 2


def test_the_machine_is_measured_again_with_pinned_threads(folder: Path, measured: list[int]) -> None:
    profile_and_log(Ranks())
    for _ in range(2):
        assert quick_profile(None, Ranks(), print, print, threads=1, cores=(0,)).rate(REQUIRED[0]) == 1e9 + 2
    assert measured == [0, 0]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[:-20],
        lambda text: "\udcff\udcfe",
        lambda text: json.dumps({**json.loads(text), "version": 0}),
        lambda text: json.dumps({**json.loads(text), "measurements": {}}),
        lambda text: "[" * 100,
    ],
    ids=["empty", "cut off", "not text", "old version", "nothing measured", "not a profile"],
)
def test_a_file_that_is_no_profile_is_replaced_by_a_new_measurement(folder: Path, spoil: Any) -> None:
    profile_and_log(Ranks())
    (file,) = folder.iterdir()
    file.write_text(spoil(file.read_text()), errors="surrogateescape")
    assert profile_and_log(Ranks())[0] == 1e9 + 2
    assert profile_and_log(Ranks())[0] == 1e9 + 2
    assert list(folder.iterdir()) == [file]


def test_a_profile_with_an_implausible_quantity_is_used_and_measured_again(
    folder: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that one start on a busy machine does not leave later ones without a rate."""
    quiet = cache.measure

    def disturbed(*arguments: Any, **kernels: Any) -> HardwareProfile:
        found = quiet(*arguments, **kernels)
        too_fast = {"both_beside_cpu_adam_bytes_per_s": Measurement(samples=(1e12,))}
        noise = noise_waivers(profile().measurements | too_fast)
        assert noise, "the rate beside the CPU's Adam is far above the rate alone"
        return replace(found, measurements={**found.measurements, **noise})

    monkeypatch.setattr(cache, "measure", disturbed)
    rate, log = profile_and_log(Ranks())
    assert rate == 1e9 + 1
    assert "not cached, and the next start measures again: both_beside_cpu_adam_bytes_per_s had" in log[-1]
    monkeypatch.setattr(cache, "measure", quiet)
    assert [profile_and_log(Ranks())[0] for _ in range(2)] == [1e9 + 2] * 2
    assert measured == [0, 0]


def test_a_profile_without_an_accelerator_is_cached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a waiver which every measurement of this machine would repeat does not prevent caching."""
    complete = cache.measure

    def without_accelerator(*arguments: Any, **kernels: Any) -> HardwareProfile:
        found = complete(*arguments, **kernels)
        waived = {"gpu_adam_params_per_s": Measurement(waived=NO_ACCELERATOR)}
        return replace(found, measurements={**found.measurements, **waived})

    monkeypatch.setattr(cache, "measure", without_accelerator)
    assert [profile_and_log(Ranks())[0] for _ in range(2)] == [1e9 + 1] * 2


def test_all_ranks_use_the_profile_of_rank_0(folder: Path, measured: list[int]) -> None:
    first = on_ranks(3, profile_and_log)
    assert sorted(measured) == [0, 1, 2]
    assert [outcome[0] for outcome in first] == [1e9 + 1] * 3
    assert [bool(outcome[1]) for outcome in first] == [True, False, False], "only rank 0 logs"
    assert [outcome[0] for outcome in on_ranks(3, profile_and_log)] == [1e9 + 1] * 3
    assert len(measured) == 3


def test_only_the_cache_of_rank_0_is_read(folder: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that ranks agree even if one node's cache has no profile, and another's has an old one."""
    read: list[Path | None] = []
    monkeypatch.setattr(cache, "_read", read.append)
    on_ranks(2, profile_and_log)
    assert len(read) == 1
    assert sorted(measured) == [0, 1]


def test_a_failure_on_rank_0_is_raised_on_all_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*facts: Any) -> str:
        raise KeyError("facts")

    monkeypatch.setattr(cache, "fingerprint", broken)
    outcomes = on_ranks(2, profile_and_log)
    assert [type(outcome) for outcome in outcomes] == [ProbeError] * 2
    assert {str(outcome) for outcome in outcomes} == {"rank 0: KeyError: 'facts'"}


def homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("place", ["a file in place of the folder", "a folder in place of the file", "no home folder"])
def test_a_profile_that_cannot_be_cached_is_used_with_a_line_of_the_log(
    place: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check reasons that stop even root, who may write to any folder."""
    monkeypatch.setattr(cache, "fingerprint", lambda *facts: "there")
    if place == "a file in place of the folder":
        folder.write_text("")
    elif place == "a folder in place of the file":
        (folder / "there.json").mkdir(parents=True)
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", homeless)
    rate, log = profile_and_log(Ranks())
    assert rate == 1e9 + 1
    assert "not cached" in log[-1]
    assert "XDG_CACHE_HOME" in log[-1]
    assert not folder.is_dir() or [path.name for path in folder.iterdir()] == ["there.json"]


def test_the_cache_folder_follows_the_xdg_specification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    at_home = Path("/home/me/.cache/deep_opt_states/abc.json")
    assert cached_path("abc", {"XDG_CACHE_HOME": "/cache"}) == Path("/cache/deep_opt_states/abc.json")
    assert cached_path("abc", {}) == cached_path("abc", {"XDG_CACHE_HOME": "not/absolute"}) == at_home


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "profile.json"
    replace_file(file, "old")

    def interrupted(source: Path, destination: Path) -> None:
        assert Path(source).read_text() == "new"
        assert file.read_text() == "old"
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            replace_file(file, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]
    assert file.read_text() == "old"
    replace_file(file, "new")
    assert file.read_text() == "new"


def test_an_error_of_the_measurement_is_raised(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*arguments: Any, **kernels: Any) -> HardwareProfile:
        raise ProfileError("no kernel")

    monkeypatch.setattr(cache, "measure", cannot)
    with pytest.raises(ProfileError, match="no kernel"):
        profile_and_log(Ranks())
    assert not folder.exists()


# Real ranks, as training calls it


def test_two_ranks_measure_together_once_and_fail_together(tmp_path: Path) -> None:
    ranks = run_ranks(2, ["-m", "tests.profiler.ranks_program"], timeout_s=120, XDG_CACHE_HOME=str(tmp_path))
    for rank in ranks:
        assert rank.returncode == 0, rank.output[-5000:]
    (first,), (second,) = (rank.answers() for rank in ranks)
    measured, cached, failed = first["outcomes"]
    assert second["outcomes"] == first["outcomes"], "the same profile, and the same reason, on all ranks"
    assert cached == measured
    profile = HardwareProfile.from_json(measured)
    assert (profile.provenance.ranks, profile.provenance.cores) == (2, 2)
    assert failed.startswith(
        "ProfileError: cpu_adam_params_per_s: is needed for every prediction, found no measurement"
    )
    assert "(rank 1: RuntimeError: broken on purpose)" in failed
    assert [line.split(maxsplit=1)[0] for line in first["log"]] == ["A", "Hardware"]
    assert second["log"] == []
    assert (first["threads"], second["threads"]) == (1, 1)
    assert len(list((tmp_path / "deep_opt_states").iterdir())) == 1
