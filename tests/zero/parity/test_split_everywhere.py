"""Check that ``make test-split`` trains with split masters, and fails if none are split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deep_opt_states.device.kernels.adam import ElementRange
from deep_opt_states.runtime.split_masters import SplitRange
from deep_opt_states.runtime.state import Split
from tests.zero.parity import case as case_module
from tests.zero.parity import split_numels
from tests.zero.parity.case import CPU, VARIABLE, WHOLE_MASTERS, Case
from tests.zero.parity.split_numels import splits_masters_in

CASE = Case(name="split", blocks=(CPU,))
ELEMENTS = ElementRange.whole(4)
REST, EARLY = Split.create(ELEMENTS), Split.all_early(ELEMENTS)


@pytest.fixture(autouse=True)
def _splits_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (case_module, split_numels):
        monkeypatch.setattr(module, "SPLITS_EVERYWHERE", True)


def engine_with(block: dict[str, Any], split: Split = REST) -> Any:
    """Return the attributes of an engine that are read, with one unit whose early ranges are those of ``split``."""
    running = SimpleNamespace(executor=SimpleNamespace(_splits=[split]))
    config = SimpleNamespace(_param_dict={"deep_optimizer_states": block})
    return SimpleNamespace(optimizer=SimpleNamespace(plan=None, _running=running), _config=config)


def test_the_makefile_sets_the_variable() -> None:
    assert f" {VARIABLE}=1 " in (Path(__file__).parents[3] / "Makefile").read_text()


def test_every_case_that_can_split_masters_has_the_key() -> None:
    def key_of(case: Case, block: dict[str, Any]) -> bool | None:
        return case.ds_config(block)["deep_optimizer_states"].get("split_masters")

    assert key_of(CASE, CPU) is True
    assert key_of(CASE, {**CPU, **WHOLE_MASTERS}) is False
    for case in (
        replace(CASE, dtype="fp32"),
        replace(CASE, offload_param=True),
        replace(CASE, shares_host_memory=True),
    ):
        assert key_of(case, CPU) is None


@pytest.mark.parametrize("block", [CPU, {**CPU, "split_masters": True}])
def test_training_that_splits_no_masters_fails(block: dict[str, Any]) -> None:
    with (
        pytest.raises(AssertionError, match="split: no masters were split"),
        splits_masters_in(CASE, engine_with(block)),
    ):
        pass


def test_training_that_splits_masters_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SplitRange, "split", lambda self: None)
    with splits_masters_in(CASE, engine_with(CPU)):
        SplitRange.split(SimpleNamespace(sums={}, elements=ELEMENTS))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("case", "engine"),
    [
        (replace(CASE, dtype="fp16"), engine_with(CPU)),
        (CASE, engine_with({**CPU, **WHOLE_MASTERS})),
        (CASE, engine_with(CPU, EARLY)),
        (CASE, SimpleNamespace(optimizer=object())),
    ],
    ids=["another dtype", "whole masters", "persistent parameters only", "stock"],
)
def test_training_that_need_not_split_masters_succeeds_without(case: Case, engine: Any) -> None:
    with splits_masters_in(case, engine):
        pass
