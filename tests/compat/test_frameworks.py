"""Check the results of ``make test-frameworks``, and that its comparison of saved files finds differences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.compat.frameworks.__main__ import EQUAL
from tests.compat.frameworks.cases import FRAMEWORKS, Framework
from tests.compat.frameworks.same_bits import differences, saved
from tests.compat.results import read_results

TRIED = read_results()["frameworks"]


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)
def test_every_run_of_a_framework_saved_the_bits_of_stock(framework: Framework) -> None:
    found = TRIED[framework.name]
    assert found["requirement"] == framework.requirement, "run make test-frameworks"
    assert set(found["runs"]) == {
        *(run.name for run in framework.runs),
        *(f"{run.name}, resumed" for run in framework.runs if run.resume),
    }
    for name, result in found["runs"].items():
        assert result.endswith(EQUAL), name


@pytest.mark.parametrize(
    ("stock", "ours", "expected"),
    [
        ([{"a": torch.tensor([0.0])}], [{"a": torch.tensor([0.0])}], []),
        ([{"a": torch.tensor([0.0])}], [{"a": torch.tensor([-0.0])}], ["state.pt[0][a] differs"]),
        ([{"a": torch.tensor([1.0])}], [{"a": torch.tensor([1], dtype=torch.int32)}], ["state.pt[0][a] differs"]),
        ([torch.tensor(1)], [], ["state.pt[0] was saved by one of the two only"]),
        ([torch.tensor([torch.nan])], [torch.tensor([torch.nan])], []),
    ],
)
def test_every_tensor_in_nested_containers_is_compared_by_its_bits(
    stock: list[object], ours: list[object], expected: list[str], tmp_path: Path
) -> None:
    for name, content in (("stock", stock), ("ours", ours)):
        (tmp_path / name / "checkpoint-3").mkdir(parents=True)
        torch.save(content, tmp_path / name / "checkpoint-3" / "state.pt")
        torch.save([torch.rand(1)], tmp_path / name / "training_args.bin")
    found = differences(saved(tmp_path / "stock"), saved(tmp_path / "ours"))
    assert found == [f"checkpoint-3/{line}" for line in expected]
