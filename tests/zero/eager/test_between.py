"""Make every kind of call between backward and ``step()``: it sees and gives the bits of stock with eager units."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_update_full_grad_vectorized,
)

from tests.kernels.intercepted import before_each_update
from tests.ranks import ranks
from tests.tiers import thorough
from tests.zero.behaviour.assigned import cleared_state, moments_by_data, moments_of_zeros, saved
from tests.zero.behaviour.behaviour_variant import (
    BehaviourNet,
    BehaviourVariant,
    Seen,
    counters,
    final_states,
    gradients,
    inputs,
    loss_of,
    moments,
    params,
    train,
    unequal,
)
from tests.zero.parity.case import CPU, STRIDE_2, WITHOUT_FORWARD_OVERLAP, eager
from tests.zero.parity.training import Block
from tests.zero.speculations import counted_speculations, wait_for_speculations

BLOCKS = (eager(CPU), eager({**STRIDE_2, "unit_size": 60, **WITHOUT_FORWARD_OVERLAP}))


Call = Callable[[Any, Path], Seen]


def values(engine: Any) -> list[tuple[Any, torch.Tensor]]:
    """Return a full value for every other parameter of ``engine``."""
    chosen = list(engine.module.parameters())[::2]
    return [(param, torch.linspace(-0.1, 0.1, param.ds_numel).view(param.ds_shape)) for param in chosen]


def nothing(engine: Any, folder: Path) -> Seen:
    yield from ()


def set_gradients(engine: Any, folder: Path) -> Seen:
    """Replace one gradient, so that one unit loses its step."""
    ((param, value), *_) = values(engine)
    safe_set_full_grad(param, value.bfloat16())
    yield from gradients(engine)


def halve_gradients(engine: Any, folder: Path) -> Seen:
    safe_update_full_grad_vectorized(list(engine.module.parameters()), lambda grad, param: grad * 0.5)
    yield from ()


def read_gradients(engine: Any, folder: Path) -> Seen:
    yield from gradients(engine)


def set_params(engine: Any, folder: Path) -> Seen:
    for param, value in values(engine):
        safe_set_full_fp32_param(param, value)
    yield from params(engine)


def set_moments(engine: Any, folder: Path) -> Seen:
    for param, value in values(engine):
        safe_set_full_optimizer_state(param, value.abs(), "exp_avg_sq")
    yield from moments(engine)


def read_states(engine: Any, folder: Path) -> Seen:
    """Read the states before the step, and write to them as a script does that keeps the tensors."""
    yield from final_states(engine)
    for master in engine.optimizer.fp32_partitioned_groups_flat[1:]:
        master.data.mul_(0.75)


def write_gathered(engine: Any, folder: Path) -> Seen:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        if dist.get_rank() == 0:
            for param in engine.module.parameters():
                param.data.mul_(0.5)
    yield from params(engine)


def gather(engine: Any, folder: Path) -> Seen:
    everything = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(everything):
        yield from (("gathered", param.data.clone()) for param in everything)


def change_learning_rate(engine: Any, folder: Path) -> Seen:
    engine.optimizer.param_groups[0]["lr"] *= 0.5
    yield "lr", engine.get_lr()


def change_betas(engine: Any, folder: Path) -> Seen:
    engine.optimizer.param_groups[0]["betas"] = (0.8, 0.99)
    yield "mom", engine.get_mom()


def clear_states(engine: Any, folder: Path) -> Seen:
    list(cleared_state(engine))
    yield from ()


def assign_moments(engine: Any, folder: Path) -> Seen:
    list(moments_of_zeros(engine))
    yield from ()


def assign_data(engine: Any, folder: Path) -> Seen:
    list(moments_by_data(engine))
    yield from ()


def save(engine: Any, folder: Path) -> Seen:
    engine.save_checkpoint(str(folder), tag="between")
    yield from saved(folder, "between")


def load(engine: Any, folder: Path) -> Seen:
    engine.load_checkpoint(str(folder), tag="between")
    yield from final_states(engine)


def load_without_moments(engine: Any, folder: Path) -> Seen:
    engine.load_checkpoint(str(folder), tag="between", load_optimizer_states=False)
    yield from final_states(engine)


def offload_and_reload(engine: Any, folder: Path) -> Seen:
    engine.offload_states()
    engine.reload_states()
    yield from params(engine)


def zero_gradients(engine: Any, folder: Path) -> Seen:
    """Discard the gradients, and compute others."""
    engine.optimizer.zero_grad()
    yield from second_backward(engine, folder)


def second_backward(engine: Any, folder: Path) -> Seen:
    loss = loss_of(engine(inputs(99)))
    engine.backward(loss)
    yield "loss", loss.detach()


def empty_cache(engine: Any, folder: Path) -> Seen:
    engine.empty_partition_cache()
    yield from ()


def evaluate(engine: Any, folder: Path) -> Seen:
    engine.eval()
    with torch.no_grad():
        yield "evaluated", engine(inputs(98)).clone()
    engine.train()


def skip(engine: Any, folder: Path) -> Seen:
    """Make the norm infinite, so that the step is skipped."""
    for param, value in values(engine)[:1]:
        safe_set_full_grad(param, torch.full_like(value, float("inf"), dtype=torch.bfloat16))
    engine.optimizer.norm_for_param_grads = {
        index: norm * float("inf") for index, norm in engine.optimizer.norm_for_param_grads.items()
    }
    yield from ()


KEEPING: tuple[Call, ...] = (nothing, read_gradients, gather, empty_cache, evaluate)
"""Calls after which all units keep the step that was speculated."""


PARTLY_KEEPING: tuple[Call, ...] = (set_gradients,)


VOIDING: tuple[Call, ...] = (
    halve_gradients,
    set_params,
    set_moments,
    read_states,
    change_learning_rate,
    change_betas,
    clear_states,
    assign_moments,
    assign_data,
    save,
    load,
    load_without_moments,
    offload_and_reload,
    second_backward,
    skip,
)


OTHERS: tuple[Call, ...] = (write_gathered, zero_gradients)


CALLS = (*KEEPING, *PARTLY_KEEPING, *VOIDING, *OTHERS)


def slow(_: object) -> None:
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.002)


def seen(block: Block, folder: Path, *, waits: bool) -> tuple[list[tuple[str, object]], dict[str, list[int]]]:
    """Return the values that a caller sees, and for each call the numbers of units speculated, kept and void.

    ``waits``: each call comes after all speculated steps have run; otherwise while some of them run.
    """
    torch.manual_seed(5)
    found: list[tuple[str, object]] = []
    speculated = {}
    variant = BehaviourVariant(block)
    engine = variant.engine(BehaviourNet(), gradient_clipping=0.0)
    pace: AbstractContextManager[object] = nullcontext() if waits else before_each_update(slow)
    with pace:
        for step, call in enumerate(CALLS):
            values = list(train(engine, 1, first=2 * step))
            engine.backward(loss_of(engine(inputs(2 * step + 1))))
            with counted_speculations() as counts:
                started = len(wait_for_speculations(engine)) if waits else 0
                values += call(engine, folder)
                if waits:
                    wait_for_speculations(engine)
                engine.step()
            speculated[call.__name__] = [started, counts.kept, counts.void]
            values += [*counters(engine), *final_states(engine)]
            found += [(f"{call.__name__}: {name}", value) for name, value in values]
    variant.close()
    return found, speculated


@pytest.mark.promise("P1")
@ranks(thorough(1), 2)
def test_calls_between_backward_and_step_see_and_give_the_bits_of_stock(tmp_path: Path) -> None:
    stock, _ = seen(None, tmp_path / "stock", waits=True)
    for index, block in enumerate(BLOCKS):
        for waits in (True, False):
            ours, speculated = seen(block, tmp_path / f"{index} {waits}", waits=waits)
            assert unequal(stock, ours) == [], (block, waits)
            if waits:
                check_speculations(speculated)


def check_speculations(of_calls: dict[str, list[int]]) -> None:
    """Check for each call how many units kept the step that was speculated in backward."""
    for call in KEEPING:
        speculated, kept, void = of_calls[call.__name__]
        assert kept == speculated > 1, call
        assert void == 0, call
    for call in PARTLY_KEEPING:
        speculated, kept, void = of_calls[call.__name__]
        assert 0 < kept < speculated, call
        assert kept + void == speculated, call
    for call in VOIDING:
        speculated, kept, void = of_calls[call.__name__]
        assert kept == 0, call
        assert void >= speculated > 1, call
