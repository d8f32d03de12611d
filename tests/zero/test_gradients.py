"""Check norms, overflows, gradients that are dropped or arrive repeatedly, and their way between GPU and host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch.utils.checkpoint import checkpoint

from deep_opt_states.zero.step import norms as ours
from deep_opt_states.zero.step.norms import Norms, sums_in_order
from perf_model.schedule.placement import Placement
from tests.ranks import ranks
from tests.software_gpu.faults.faults import sums_on_the_host
from tests.software_gpu.faults.missing_order import do_nothing
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.tiers import thorough
from tests.zero.behaviour.behaviour_variant import FP32, BehaviourVariant
from tests.zero.parity.case import CPU, Case
from tests.zero.parity.training import Block, closing_engine, recorded, shared_folder, train

STREAMED, MIXED = {"placement": "streamed"}, {"placement": "stride", "update_stride": 2}
WIDTH = 8


def test_a_thousand_squares_are_added_up_in_order() -> None:
    """Compare the sums themselves: the fp32 norm hides most orders."""
    values = torch.randn(1701, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).exp() ** 2
    expected = [0.0, 0.0]
    for index, value in enumerate(values.tolist()):
        expected[index >= 1000] += value
    assert sums_in_order(values, torch.tensor([0, 1000, 1701])).tolist() == expected
    assert values[:1000].sum().item() != expected[0], "another order gives other bits"


def test_the_flag_is_not_read_before_its_reduction_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check with experts on several ranks: the norms, whose computation would wait for all, are stock's then."""

    def reduce_late(flag: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(wait=lambda: flag.fill_(1))

    monkeypatch.setattr(ours.dist, "all_reduce", reduce_late)
    optimizer = SimpleNamespace(
        model_parallel_group=None,
        _autoep_expert_parallel_group=lambda params: "experts",
        _model_parallel_all_reduce=lambda **_: None,
        fp16_groups=[["param"]],
        get_param_id=hash,
        norm_for_param_grads={},
        dp_process_group=None,
    )
    assert Norms(optimizer).overflow()


def engine_of(model: torch.nn.Module, block: Block, accumulation: int = 1, **zero: Any) -> Any:
    changes = {"gradient_clipping": 1.0, "gradient_accumulation_steps": accumulation, **FP32}
    zero = {"sub_group_size": WIDTH * WIDTH + WIDTH, **zero}
    return BehaviourVariant(block).engine(model, **changes, zero_optimization=zero)


class LayersInTurn(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.second = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, uses_second: bool, *, uses_of_first: int = 1, recomputed: bool = False) -> Any:
        x = x.requires_grad_(recomputed)
        for _ in range(uses_of_first):
            x = checkpoint(self.first, x, use_reentrant=True) if recomputed else self.first(x)
        return (self.second(x) if uses_second else x).square().sum()


def rows(seed: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))


def step_after(
    block: Block, disturb: Callable[[Any], object], accumulation: int = 1, *, uses_second: bool = True, **zero: Any
) -> Any:
    engine = engine_of(LayersInTurn(), block, accumulation, **zero)
    try:
        for first, uses in ((1, True), (20, uses_second)):
            for position in range(accumulation):
                engine.backward(engine(rows(first + position), uses))
                engine.step()
            if first == 1:
                disturb(engine)
        params = engine.module.parameters()
        return float(engine.get_global_grad_norm()), [safe_get_full_fp32_param(param).tolist() for param in params]
    except AssertionError:
        return "AssertionError"
    finally:
        engine.destroy()


@ranks(1)
def test_an_abandoned_window_of_gradients_is_not_applied() -> None:
    def abandon(engine: Any) -> None:
        engine.backward(engine(rows(10), True))
        engine.optimizer.zero_grad()

    for accumulation, block in ((2, CPU), (3, STREAMED)):
        runs = (step_after(block, disturb, accumulation, uses_second=False) for disturb in (abandon, do_nothing))
        abandoned, undisturbed = runs
        assert abandoned == undisturbed, (accumulation, block)
        assert abandoned[0] > 0


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")


def fail_in_backward(engine: Any) -> None:
    hook = engine.module.first.register_forward_hook(lambda _, __, output: RaisesInBackward.apply(output))
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.backward(engine(rows(1), True))
    hook.remove()


@ranks(1)
def test_gradients_of_a_failed_backward_are_not_mixed_with_later_ones() -> None:
    """Check DeepSpeed's bucket, in whose own memory gradients are reduced: it still holds that backward's."""
    undisturbed = step_after(None, do_nothing, reduce_scatter=False)
    for fail in (fail_in_backward, lambda engine: (fail_in_backward(engine), engine.zero_grad())):
        # Stock reduces the gradients that are left in the bucket together with the next ones.
        assert step_after(None, fail, reduce_scatter=False) == "AssertionError"
        for block in (CPU, STREAMED):
            assert step_after(block, fail, reduce_scatter=False) == undisturbed, block


LARGE, SMALL, ONE_ELEMENT = 100_000, 100, 1
"""Bucket sizes. When a gradient arrives again, the previous one is still in the bucket: always, sometimes, or never."""


def gradients_of_shared_layer(block: Block, bucket: int, accumulation: int, *, recomputed: bool) -> Any:
    engine = engine_of(LayersInTurn(), block, accumulation, reduce_bucket_size=bucket)
    found: dict[str, torch.Tensor] = {}
    try:
        for step in range(3):
            for position in range(accumulation):
                batch = rows(100 * (step * accumulation + position) + dist.get_rank())
                engine.backward(engine(batch, True, uses_of_first=4, recomputed=recomputed))
                if position == accumulation - 1:
                    for name, param in engine.module.named_parameters():
                        found[f"{name} in step {step}"] = safe_get_full_grad(param).clone()
                engine.step()
        return found | recorded(engine).tensors
    finally:
        engine.destroy()


def relative_difference(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - tensor).norm() / tensor.norm()) for name, tensor in expected.items())


@ranks(1, thorough(2))
def test_repeated_gradients_are_summed_which_stock_refuses_or_loses() -> None:
    """Check reentrant checkpointing of a shared layer. When stock sums its gradients, remove our deviation."""
    for block, bucket, accumulation in ((CPU, LARGE, 1), (STREAMED, SMALL, 1), (STREAMED, ONE_ELEMENT, 2)):
        expected = gradients_of_shared_layer(None, LARGE, accumulation, recomputed=False)
        found = gradients_of_shared_layer(block, bucket, accumulation, recomputed=True)
        assert relative_difference(expected, found) < 1e-6, (block, bucket, accumulation)
        # A window's second micro-batch adds its gradients to the first one's in another order.
        if dist.get_world_size() == 1 and accumulation == 1:
            assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items()), (block, bucket)
    with pytest.raises((AssertionError, AttributeError)):
        gradients_of_shared_layer(None, LARGE, 1, recomputed=True)
    expected = gradients_of_shared_layer(None, LARGE, 1, recomputed=False)
    assert relative_difference(expected, gradients_of_shared_layer(None, ONE_ELEMENT, 1, recomputed=True)) > 0.1


TRAFFIC_CASES = [(block, accumulation) for accumulation in (1, 3) for block in (CPU, STREAMED, MIXED)]


def traffic(block: dict[str, Any], accumulation: int) -> dict[str, Any]:
    buckets = {"reduce_bucket_size": 100_000}
    case = Case(name="traffic", blocks=(block,), accumulation=accumulation, sub_group_size=4000, zero=buckets)
    with shared_folder() as folder, closing_engine(case, block) as engine:
        optimizer = engine.optimizer
        staging = optimizer._gradients._staging
        staging._device = device = mock.Mock(wraps=staging._device)
        reserved = len(optimizer.accounting_device.reserved)
        train(engine, case, folder)
        assert len(optimizer.accounting_device.reserved) == reserved, "all memory is reserved at the start"
        copies = [call.args for call in device.copy.call_args_list]
        down, up = ([pair[end].nbytes for pair in copies if pair[end].is_cpu] for end in (0, 1))
        return {
            **{"d2h_bytes": sum(down), "d2h_copies": len(down), "h2d_bytes": sum(up), "h2d_copies": len(up)},
            "steps": case.steps,
            "cpu_numel": optimizer.plan.numel(Placement.CPU),
            "parameters": sum(len(group) for group in optimizer.fp16_groups),
            "element_bytes": optimizer.gradient_accumulation_dtype.itemsize,
        }


def check_traffic(block: dict[str, Any], accumulation: int, found: dict[str, Any], *, sums_stay: bool) -> None:
    """Check bytes and copies. ``sums_stay`` on the accelerator, or are in host memory, as stock's are."""
    label = f"{block}, {accumulation} micro-batches"
    once = found["steps"] * found["element_bytes"] * found["cpu_numel"]
    if accumulation > 1 and not sums_stay:
        assert (found["d2h_bytes"], found["h2d_bytes"]) == (accumulation * once, (accumulation - 1) * once), label
    else:
        assert (found["d2h_bytes"], found["h2d_bytes"], found["h2d_copies"]) == (once, 0, 0), label
    # If everything else is streamed, the gradients of persistent parameters are copied.
    assert 0 < found["d2h_copies"] < found["parameters"] * found["steps"] * accumulation, "copied together"


@ranks(1, group=software_process_group)
def test_gradients_cross_pcie_only_as_often_as_their_placement_requires() -> None:
    """Count on the GPU in software: a gradient crosses once or not at all, unless its sum is in host memory."""
    for block, accumulation in TRAFFIC_CASES:
        # Without a unit on the device, sums over micro-batches are in host memory, as if the device had no room.
        sums_stay = block != CPU
        with plugged(), nullcontext() if sums_stay else sums_on_the_host():
            check_traffic(block, accumulation, traffic(block, accumulation), sums_stay=sums_stay)
