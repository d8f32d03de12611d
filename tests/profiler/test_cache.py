"""The cache of quick profiles: it saves time, and never fails."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from deep_opt_states.profiler import cache
from deep_opt_states.profiler.cache import cached_path, quick_profile, replace_file
from deep_opt_states.profiler.ranks import OneRank, ProbeError, Ranks
from perf_model.prediction.hardware import REQUIRED, HardwareProfile, Measurement, ProfileError, Provenance
from tests.profiler.threads import on_ranks


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "deep_opt_states"


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks that measured: each measurement finds another rate, the n-th 1e9 + n, on rank 0's count."""
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
    return quick_profile(None, ranks, log.append, threads=1).rate("cpu_adam_params_per_s"), log


def test_the_second_time_nothing_is_measured(folder: Path, measured: list[int]) -> None:
    assert profile_and_log(OneRank()) == (
        1e9 + 1,
        ["No hardware profile for this machine yet: measuring a quick one."],
    )
    (file,) = folder.iterdir()
    assert profile_and_log(OneRank()) == (1e9 + 1, [f"Hardware profile of 2026-01-02, from {file}."])
    assert measured == [0]


def test_installing_triton_is_measured_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's Adam was waived without it."""
    monkeypatch.setattr(cache, "triton_version", lambda: "")
    profile_and_log(OneRank())
    monkeypatch.setattr(cache, "triton_version", lambda: "3.6.0")
    assert profile_and_log(OneRank())[0] == 1e9 + 2


def test_threads_that_are_pinned_are_measured_anew(folder: Path, measured: list[int]) -> None:
    profile_and_log(OneRank())
    for _ in range(2):
        assert quick_profile(None, OneRank(), [].append, threads=1, cores=(0,)).rate(REQUIRED[0]) == 1e9 + 2
    assert measured == [0, 0]


def test_another_fingerprint_is_measured_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile_and_log(OneRank())
    monkeypatch.setattr(cache, "fingerprint", lambda *facts: "another")
    assert profile_and_log(OneRank())[0] == 1e9 + 2
    assert len(list(folder.iterdir())) == 2


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
    ids=["empty", "cut", "no text", "old version", "nothing measured", "no profile"],
)
def test_a_file_that_is_no_profile_is_measured_anew_and_replaced(folder: Path, spoil: Any) -> None:
    profile_and_log(OneRank())
    (file,) = folder.iterdir()
    file.write_text(spoil(file.read_text()), errors="surrogateescape")
    assert profile_and_log(OneRank())[0] == 1e9 + 2
    assert profile_and_log(OneRank())[0] == 1e9 + 2
    assert list(folder.iterdir()) == [file]


def test_ranks_agree_on_rank_0s_profile(folder: Path, measured: list[int]) -> None:
    first = on_ranks(3, profile_and_log)
    assert sorted(measured) == [0, 1, 2]
    assert [outcome[0] for outcome in first] == [1e9 + 1] * 3
    assert [bool(outcome[1]) for outcome in first] == [True, False, False], "only rank 0 speaks"
    assert [outcome[0] for outcome in on_ranks(3, profile_and_log)] == [1e9 + 1] * 3
    assert len(measured) == 3


def test_only_rank_0s_cache_decides(folder: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a node whose home has no profile, and on one whose home has an old one."""
    read: list[Path | None] = []
    monkeypatch.setattr(cache, "_read", read.append)
    on_ranks(2, profile_and_log)
    assert len(read) == 1
    assert sorted(measured) == [0, 1]


def test_a_failure_on_rank_0_reaches_the_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*facts: Any) -> str:
        raise KeyError("facts")

    monkeypatch.setattr(cache, "fingerprint", broken)
    outcomes = on_ranks(2, profile_and_log)
    assert [type(outcome) for outcome in outcomes] == [ProbeError] * 2
    assert {str(outcome) for outcome in outcomes} == {"rank 0: KeyError: 'facts'"}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Permissions do not keep root out; a file where the folder should be does.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    rate, log = profile_and_log(OneRank())
    assert rate == 1e9 + 1
    assert "not cached" in log[-1]
    assert "Set XDG_CACHE_HOME" in log[-1]


def test_a_folder_in_the_place_of_the_file_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "fingerprint", lambda *facts: "there")
    (folder / "there.json").mkdir(parents=True)
    rate, log = profile_and_log(OneRank())
    assert rate == 1e9 + 1
    assert "not cached" in log[-1]
    assert [path.name for path in folder.iterdir()] == ["there.json"]


def test_no_home_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    rate, log = profile_and_log(OneRank())
    assert rate == 1e9 + 1
    assert "not cached" in log[-1]


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    at_home = Path("/home/me/.cache/deep_opt_states/abc.json")
    assert cached_path("abc", {"XDG_CACHE_HOME": "/cache"}) == Path("/cache/deep_opt_states/abc.json")
    assert cached_path("abc", {}) == cached_path("abc", {"XDG_CACHE_HOME": "not/absolute"}) == at_home


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_measuring_raises_is_raised(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*arguments: Any, **kernels: Any) -> HardwareProfile:
        raise ProfileError("no kernel")

    monkeypatch.setattr(cache, "measure", cannot)
    with pytest.raises(ProfileError, match="no kernel"):
        profile_and_log(OneRank())
    assert not folder.exists()
