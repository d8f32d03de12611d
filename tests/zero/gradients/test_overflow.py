"""An overflow on some of the ranks that share a model makes all of them skip the step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deep_opt_states.zero.step import norms
from tests.launch import run_ranks


def test_an_overflow_on_one_model_parallel_rank_skips_the_step_on_all() -> None:
    """Check that all ranks finish: otherwise they wait forever in the reduction of the norm, until they are killed.

    Without a model-parallel group, the plugin issues the same reductions as stock.
    """
    for finished in run_ranks(2, ["-m", "tests.zero.gradients.overflow_ranks"], timeout_s=60):
        assert finished.returncode == 0, finished.output[-5000:]
        shared, alone = finished.answers()
        assert (shared["name"], shared["differences"]) == ("overflow_on_one_model_parallel_rank", [])
        assert (alone["name"], alone["differences"]) == ("no_model_parallel_group", [])
        assert min(shared["seen"], alone["seen"]) > 50


class ReducedLate:
    """A reduction that delivers the overflow of another rank only when it is waited for."""

    def __init__(self, flag: torch.Tensor) -> None:
        self._flag = flag

    def wait(self) -> None:
        self._flag.fill_(1)


def test_the_flag_is_not_read_before_its_reduction_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check with experts that are distributed over the ranks.

    The norms, whose computation would wait for all reductions, are stock's then.
    """
    monkeypatch.setattr(norms.dist, "all_reduce", lambda tensor, **_: ReducedLate(tensor))
    optimizer = SimpleNamespace(
        model_parallel_group=None,
        _autoep_expert_parallel_group=lambda params: "experts",
        _model_parallel_all_reduce=lambda **_: None,
        fp16_groups=[["param"]],
        get_param_id=hash,
        norm_for_param_grads={},
        dp_process_group=None,
    )
    assert norms.Norms(optimizer).overflow()
