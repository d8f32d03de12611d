"""Training with the plugin gives stock's bits: masters, moments, step counts, 16-bit parameters, losses, norms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks
from tests.tiers import thorough
from tests.zero.parity.cases import CASES, DEPARTURES
from tests.zero.parity.naive import NAIVE

BY_NAME = {case.name: case for case in (*CASES, *DEPARTURES)}
STOCK, OURS = "DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"


class Results:
    """Trains the cases of a world size when the first of them is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._by_world_size: dict[int, list[dict[str, Any]]] = {}

    def of(self, name: str, world_size: int) -> list[dict[str, Any]]:
        """One result a rank."""
        if world_size not in self._by_world_size:
            path = self._folder / str(world_size)
            ranks = run_ranks(world_size, ["-m", "tests.zero.parity.worker", str(path)], timeout_s=400)
            for rank, finished in enumerate(ranks):
                assert finished.returncode == 0, f"rank {rank}:\n{finished.output[-5000:]}"
            self._by_world_size[world_size] = [
                json.loads(Path(f"{path}.{rank}").read_text()) for rank in range(world_size)
            ]
        results = self._by_world_size[world_size]
        for result in results:
            assert name in result, "an earlier case failed"
            assert "error" not in result[name], result[name]["error"]
        return [result[name] for result in results]


def made_once(name: str, world_size: int) -> Any:
    """One worker of pytest-xdist tests all of a world size, and trains them once."""
    group = pytest.mark.xdist_group(f"parity of {world_size}")
    return thorough(name, group) if world_size == 3 else pytest.param(name, id=name, marks=group)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("parity"))


@pytest.mark.parametrize("name", [made_once(case.name, case.world_size) for case in CASES])
def test_same_bits_as_stock(name: str, results: Results) -> None:
    case = BY_NAME[name]
    for rank, result in enumerate(results.of(case.name, case.world_size)):
        assert result["stock class"] == STOCK
        for arm, found in result["differences"].items():
            assert result["classes"][arm] == (STOCK if arm.endswith("to stock") else OURS)
            assert found == [], f"rank {rank}, {arm}"
            forwards, sub_groups = result["deferred"][arm]
            if arm.endswith("to stock") or "'overlap_forward': False" in arm:
                assert forwards == 0, arm
            else:
                assert forwards >= (case.steps - len(case.poisoned)) // 2, f"{arm}: no update went on in a forward"
                assert sub_groups >= min(2, len(result["numbers"]["step"])), f"{arm}: none was waited for there"
        numbers = result["numbers"]
        assert (len(numbers["step"]) >= 4) == (case.name != "one sub-group"), "a case is about several sub-groups"
        if case.schedule and case.steps > 5:
            assert len(set(numbers["lr"])) > len({group.lr for group in case.groups})
        assert len(set(numbers["lr"][-len(case.groups) :])) == len({group.lr for group in case.groups})
        if case.clip:
            assert any(case.clip < norm < float("inf") for norm in numbers["norm"]), numbers["norm"]
        if not case.resume:
            assert numbers["skipped"][-1] >= len(case.poisoned)


@pytest.mark.parametrize("name", [made_once(case.name, case.world_size) for case in DEPARTURES])
def test_a_missing_gradient_is_zero_where_stock_reuses_the_last_one(name: str, results: Results) -> None:
    """Our one departure. When stock no longer differs, it has been mended upstream, and ours can go."""
    for rank, result in enumerate(results.of(name, BY_NAME[name].world_size)):
        for arm, found in result["differences"].items():
            assert found == [], f"rank {rank}, {arm}"
        assert result["stock differs"], f"rank {rank}"


@pytest.mark.parametrize("name", [made_once(name, BY_NAME[case].world_size) for name, (case, *_) in NAIVE.items()])
def test_the_suite_sees_a_naive_rewrite(name: str, results: Results) -> None:
    ranks = results.of(name, BY_NAME[NAIVE[name][0]].world_size)
    assert any(result["differences"]["naive"] for result in ranks)
