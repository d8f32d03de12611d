"""Test ``--params``: a dense model with exactly so many parameters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.__main__ import main
from perf_model.training_run.decoder import MAX_PARAMETERS, MIN_PARAMETERS, generic_model
from perf_model.training_run.model import ModelError
from tests.cli.test_planning_commands import job


@given(st.integers(MIN_PARAMETERS, MAX_PARAMETERS) | st.integers(MIN_PARAMETERS, 10**10))
def test_a_generic_model_has_exactly_the_number_of_parameters(numel: int) -> None:
    shape = generic_model(numel)
    assert shape.numel == shape.active_numel == numel
    looked_up = 0 if shape.tied else shape.vocab * shape.hidden
    assert shape.multiplied_numel + looked_up == pytest.approx(numel, rel=0.01)


@given(st.integers(10**9, 10**12), st.none() | st.integers(1, 2_000), st.none() | st.integers(1, 10**5))
def test_layers_and_width_of_a_generic_model_are_those_that_are_given(
    numel: int, layers: int | None, hidden: int | None
) -> None:
    try:
        shape = generic_model(numel, layers, hidden)
    except ModelError:
        return
    assert shape.numel == numel
    assert shape.layers == (layers or shape.layers)
    assert shape.hidden == (hidden or shape.hidden)


@pytest.mark.parametrize(("numel", "layers", "hidden"), [(8.03e9, 32, 4096), (70.6e9, 80, 8192), (405.9e9, 126, 16384)])
def test_default_widths_are_close_to_those_of_llama_3(numel: float, layers: int, hidden: int) -> None:
    shape = generic_model(int(numel))
    assert shape.layers == pytest.approx(layers, rel=0.15)
    assert shape.hidden == pytest.approx(hidden, rel=0.15)


@pytest.mark.parametrize("numel", [1e8, 2e8, 1e9, 7e9, 32e9, 32.8e9, 1e12])
def test_eight_tensor_parallel_ranks_can_divide_the_heads(numel: float) -> None:
    shape = generic_model(int(numel))
    assert shape.heads % 8 == 0
    assert shape.kv_heads % 8 == 0


def test_plan_states_the_widths_that_are_assumed_for_params(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", *job()[:2], "--params", "32e9", *job()[4:], "--unit-size", "1000000000"]
    assert main([*arguments, "--host-memory-gb", "900"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "32B (32.00 B parameters) on 4 x H100-80GB" in shown
    assert "model: a generic dense model with 55 layers of width 7,168, feed-forwards of 20,039" in shown
    assert main([*arguments, "--layers", "64", "--hidden", "5120", "--host-memory-gb", "900"]) == 0
    assert "64 layers of width 5,120" in " ".join(capsys.readouterr().out.split())
