"""Check that training beside tensor parallelism has the bits of stock, and that uneven shards are refused."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.auto_ep_presets import base as auto_ep_presets

from deep_opt_states.zero.start.unsupported import Unsupported
from deep_opt_states.zero.step import norms
from tests.ranks import ended_ranks, on_ranks, once, ranks
from tests.tiny_llama import tiny_llama
from tests.zero.behaviour.experts import do_nothing, mixtral
from tests.zero.failures.test_failures import failing_update, must_raise_everywhere, must_refuse
from tests.zero.parity.case import STRIDE_2, WITHOUT_FORWARD_OVERLAP
from tests.zero.parity.training import assert_same_bits, differences
from tests.zero.tensor_parallel.cases import (
    ARMS,
    CASES,
    PLACEMENTS,
    QUICK,
    TensorParallelCase,
    block_of,
    closing_engine_of,
    planned_numels,
    run,
    tokens_of,
    train,
)
from tests.zero.tensor_parallel.layouts import MODEL_RANKS, SharedModel, layouts

STOCK, OURS = "DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"
CASES_OF = {"quick": QUICK, "all": CASES}
"""The cases at two ranks, and all of them at two and four ranks for the thorough tier."""


@once
def trained(world_size: int, selection: str) -> list[dict[str, dict[str, Any]]]:
    """Return the findings of each rank in each case; the ranks are started once per worker of pytest-xdist."""
    return on_ranks(world_size, train_cases, selection, timeout_s=900)


def train_cases(selection: str) -> dict[str, dict[str, Any]]:
    # DeepSpeed requires instructions that this CPU may lack, although PyTorch computes in fp16 on every CPU.
    get_accelerator().is_fp16_supported = lambda: True
    by_name = layouts()
    return {case.name: compared(case, by_name[case.layout]) for case in CASES_OF[selection]}


def compared(case: TensorParallelCase, layout: SharedModel) -> dict[str, Any]:
    """Train the case with stock and with each placement, and return the differences and the numbers of stock."""
    planned, norms = planned_numels()
    stock = run(case, layout, None)
    found = {arm: run(case, layout, block_of(arm, layout)) for arm in ARMS}
    return {
        "numbers": stock.numbers,
        "elements": sum(tensor.numel() for name, tensor in stock.tensors.items() if name.startswith("master")),
        "planned elements": planned,
        "elements of norms": norms,
        "masters": sum(name.startswith("master") for name in stock.tensors),
        "classes": [record.optimizer_class for record in (stock, *found.values())],
        "differences": {arm: differences(stock, record) for arm, record in found.items()},
    }


def parameters() -> list[Any]:
    return [
        pytest.param(
            world_size,
            selection,
            case,
            id=f"{world_size} ranks, {case.name}",
            marks=[
                pytest.mark.xdist_group(f"tensor parallel {selection} {world_size}"),
                *([pytest.mark.thorough] if selection == "all" else []),
            ],
        )
        for world_size, selection in ((2, "quick"), (2, "all"), (4, "all"))
        for case in CASES_OF[selection]
    ]


@pytest.mark.promise("P1")
@pytest.mark.parametrize(("world_size", "selection", "case"), parameters())
def test_training_beside_tensor_parallelism_has_the_bits_of_stock(
    world_size: int, selection: str, case: TensorParallelCase
) -> None:
    for rank, by_name in enumerate(trained(world_size, selection)):
        found = by_name[case.name]
        assert found["classes"] == [STOCK, *[OURS] * len(ARMS)]
        assert found["differences"] == {arm: [] for arm in ARMS}, f"rank {rank}"
        numbers = found["numbers"]
        assert len(numbers["step"]) >= 3, "a case must have several sub-groups"
        assert found["masters"] >= 14
        if case.layout == "AutoTP" and case.zero_init:
            unplanned = found["planned elements"] - found["elements"]
            assert 0 <= unplanned <= found["elements of norms"], "`plan --tensor-parallel` plans for another model"
        if case.setting != "plain":
            assert any(0.1 < norm < float("inf") for norm in numbers["norm"]), "clipping was never active"
        assert numbers["skipped"][-1] == (case.dtype == "fp16"), "the overflow on one rank skips one step on all"


CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "deep_optimizer_states": {},
}


@pytest.mark.promise("P6")
@ranks(2)
def test_shards_of_different_sizes_are_refused_with_the_name_of_autotp() -> None:
    model = tiny_llama(num_attention_heads=6, num_key_value_heads=3, hidden_size=48)
    config = {**CONFIG, "tensor_parallel": {"autotp_size": 2}}
    with pytest.raises(Unsupported) as caught:
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    refused = str(caught.value)
    assert refused.startswith("tensor_parallel.autotp_size, or the model-parallel size of the mpu: must")
    assert "elements of" in refused
    assert "on rank 0 and" in refused
    assert "Choose a size that divides the attention heads" in refused


@pytest.mark.promise("P6")
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("AutoTP", "offload with AutoEP.AutoTP folding is not validated yet"),
        ("mpu", "AutoEP does not currently support tensor model parallelism from mpu"),
    ],
)
@ranks(2)
def test_deepspeed_refuses_experts_beside_tensor_parallelism_with_offloading(name: str, expected: str) -> None:
    """Detect a release that supports it: the plugin has not been tested with it."""
    layout = layouts()[name]
    experts = {"enabled": True, "autoep_size": MODEL_RANKS, "preset_model": "mixtral", "use_grouped_mm": False}
    model = mixtral()
    options = {} if layout.mpu is None else {"mpu": layout.mpu, "dist_init_required": False}
    without_recorders = mock.patch.object(
        auto_ep_presets, "_install_instance_transformers_output_recorders", do_nothing
    )
    with without_recorders, pytest.raises(ValueError, match=expected):
        deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={**CONFIG, "expert_parallel": experts, **layout.config},
            **options,
        )


def step(engine: Any) -> None:
    engine.backward(engine(tokens_of(99)))
    engine.step()


@pytest.mark.promise("P6")
@pytest.mark.thorough
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("name", ["AutoTP", "mpu"])
@ranks(4, timeout_s=600)
def test_a_failed_update_on_one_rank_stops_all_ranks_that_share_models(
    name: str, deferred: bool, tmp_path: Path
) -> None:
    """Let rank 1 fail in ``step()``, or in an update that is in flight during the next forward.

    It shares a model with rank 0, and a shard with rank 3. All ranks stop, and recover from a checkpoint.
    """
    layout, case = layouts()[name], TensorParallelCase(name, "bf16", "clipping", zero_init=False)
    block = STRIDE_2 if deferred else {**STRIDE_2, **WITHOUT_FORWARD_OVERLAP}
    with closing_engine_of(case, layout, block) as engine:
        train(engine, case, layout, 2)
        engine.save_checkpoint(str(tmp_path))
        step(engine)
        with failing_update(engine, "cpu"):
            if deferred:
                step(engine)
            must_raise_everywhere(lambda: step(engine))
        must_refuse(step, engine)
        must_refuse(engine.save_checkpoint, str(tmp_path / "inconsistent"))
        engine.load_checkpoint(str(tmp_path))
        ours = train(engine, case, layout, 2)
    with closing_engine_of(case, layout, None) as engine:
        engine.load_checkpoint(str(tmp_path))
        assert_same_bits(train(engine, case, layout, 2), ours)


STUCK_S = 10
"""How long a rank is at the same instruction before it is ended. Its steps take milliseconds."""


def test_training_stops_in_the_norm_if_the_overflow_is_not_reduced_over_the_ranks_that_share_a_model(
    tmp_path: Path,
) -> None:
    """Show that the cases in fp16 detect this fault.

    One rank waits in the reduction of the norm for the rank that has skipped the step. Either it is stuck, or Gloo ends
    it because the other rank calls another collective. The program ends ranks that are stuck.
    """
    ended = ended_ranks(2, partial(train_with_an_overflow_that_is_not_reduced), tmp_path)
    for finished in ended:
        assert "trained without the fault" in finished.output, finished.output[-3000:]
        assert "trained with the fault" not in finished.output
        assert finished.returncode != 0
    assert any("_get_norm_groups" in finished.output for finished in ended), ended[0].output[-3000:]


def train_with_an_overflow_that_is_not_reduced() -> None:
    get_accelerator().is_fp16_supported = lambda: True
    case = TensorParallelCase("mpu", "fp16", "plain", zero_init=False)
    layout = layouts()[case.layout]
    stock = run(case, layout, None)
    assert_same_bits(stock, run(case, layout, PLACEMENTS["cpu"]))
    print("trained without the fault", flush=True)
    threading.Thread(target=end_if_stuck, args=[threading.get_ident()], daemon=True).start()
    with mock.patch.object(norms, "model_parallel_all_reduce"):
        run(case, layout, PLACEMENTS["cpu"])
    print("trained with the fault", flush=True)


def end_if_stuck(ident: int) -> None:
    """End this process when the thread ``ident`` has been at the same instruction for ``STUCK_S`` seconds."""
    last: list[Any] = []
    since_s = time.monotonic()
    while True:
        time.sleep(0.5)
        frames = [
            (frame.f_code.co_name, frame.f_lasti) for frame, _ in traceback.walk_stack(sys._current_frames()[ident])
        ]
        if frames != last:
            last, since_s = frames, time.monotonic()
        elif time.monotonic() - since_s > STUCK_S:
            print("stuck in", [name for name, _ in frames], flush=True)
            os._exit(1)
