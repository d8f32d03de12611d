"""Check that the norms of sub-groups, added up in a few kernels, have the bits of stock's loop over the parameters."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.zero import stage3 as stock
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from deep_opt_states.zero.step import norms as ours
from deep_opt_states.zero.step.norms import Norms, sums_in_order

OTHER_RANK = 0.1
"""The sum of the other rank, which the reductions of this test add in fp32."""

EXTREME = (0.0, math.inf, math.nan, 5e-324, 1e-200, 1e19, 1e160, 1e300)
"""Norms whose squares are zero, subnormal, infinite in fp32 or infinite in fp64."""


class NormOptimizer(stock.DeepSpeedZeroOptimizer_Stage3):
    """Stock's optimizer as far as it computes norms: parameters are their ids."""

    def __init__(self, sizes: Sequence[int], norm_for_param_grads: dict[int, torch.Tensor]) -> None:
        first = [sum(sizes[:index]) for index in range(len(sizes))]
        self.fp16_groups = [list(range(begin, begin + size)) for begin, size in zip(first, sizes, strict=True)]
        self.norm_for_param_grads = norm_for_param_grads
        self.dp_process_group = self.model_parallel_group = None
        self.offload_optimizer = True
        self.sub_group_process_groups = [None] * len(sizes)

    def get_param_id(self, param: Any) -> int:
        return int(param)

    def _get_param_partition_group(self, param: Any) -> None:
        return None

    def _grad_norm_counts_every_rank(self, params: Any, process_group: Any) -> bool:
        return True

    def _autoep_expert_parallel_group(self, params: Any) -> None:
        return None


@contextmanager
def two_ranks() -> Iterator[None]:
    """Replace reductions by the addition of one number, as on the other of two ranks; an overflow stays as it is."""

    def all_reduce(tensor: torch.Tensor, **_: Any) -> None:
        assert tensor.numel() == 1
        if tensor.is_floating_point():
            tensor.add_(OTHER_RANK)

    assert stock.dist is ours.dist
    with mock.patch.object(ours.dist, "all_reduce", all_reduce):
        yield


def bits(norms: Sequence[torch.Tensor]) -> list[bytes]:
    assert all(norm.dtype == torch.float32 and norm.shape == () and norm.is_cpu for norm in norms)
    return [norm.numpy().tobytes() for norm in norms]


def random_norms(seed: int, count: int, dtype: torch.dtype, missing: float, extreme: float) -> dict[int, torch.Tensor]:
    """Return the norms of ``count`` parameters, without those of some that got no gradient, in a random order."""
    chance = random.Random(seed)
    values: dict[int, torch.Tensor] = {}
    for param in chance.sample(range(count), count):
        if chance.random() >= missing:
            value = chance.choice(EXTREME) if chance.random() < extreme else math.exp(chance.gauss(0, 5))
            values[param] = torch.tensor(value, dtype=dtype)
    return values


@pytest.mark.promise("P1")
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    dtype=st.sampled_from((torch.float64, torch.float32)),
    missing=st.sampled_from((0.0, 0.1, 1.0)),
    extreme=st.sampled_from((0.0, 0.02)),
    seed=st.integers(0, 2**32),
)
def test_norms_of_sub_groups_have_the_bits_of_stock(
    sizes: list[int], dtype: torch.dtype, missing: float, extreme: float, seed: int
) -> None:
    """Check both ways to read the norms: alone, and with the overflow. fp32 norms are those without fp64 support."""
    optimizer = NormOptimizer(sizes, random_norms(seed, sum(sizes), dtype, missing, extreme))
    with two_ranks(), mock.patch.object(ours, "norm_dtype", return_value=dtype):
        expected = bits(optimizer._get_norm_groups())
        norms = Norms(optimizer)
        assert bits(norms.per_sub_group()) == expected
        finite = all(norm.isfinite() for norm in optimizer.norm_for_param_grads.values())
        assert norms.overflow() is not finite
        assert bits(norms.per_sub_group()) == expected


def test_a_thousand_parameters_are_added_up_in_order() -> None:
    """Check large sub-groups, for which another order would give other bits."""
    optimizer = NormOptimizer([1000, 1, 700], random_norms(1, 1701, torch.float64, 0.0, 0.0))
    in_another_order = NormOptimizer([1000, 1, 700], dict(optimizer.norm_for_param_grads))
    in_another_order.fp16_groups[0].reverse()
    with two_ranks():
        assert bits(Norms(optimizer).per_sub_group()) == bits(optimizer._get_norm_groups())
    # The fp32 norm hides most orders: compare the sums themselves.
    values = torch.stack([optimizer.norm_for_param_grads[param] for param in range(1701)]) ** 2
    sums = sums_in_order(values, torch.tensor([0, 1000, 1001, 1701]))
    expected = [in_turn(values[:1000]), in_turn(values[1000:1001]), in_turn(values[1001:])]
    assert sums.tolist() == expected
    assert values[:1000].sum().item() != expected[0], "another order gives other bits"


def in_turn(values: torch.Tensor) -> float:
    total = 0.0
    for value in values.tolist():
        total += value
    return total


class CountedOperations(TorchDispatchMode):
    """A mode that counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def operations(sizes: list[int]) -> list[str]:
    norms = Norms(NormOptimizer(sizes, random_norms(0, sum(sizes), torch.float64, 0.0, 0.0)))
    counted = CountedOperations()
    with two_ranks():
        norms.per_sub_group()
        with counted:
            norms.per_sub_group()
    return counted.names


def test_the_number_of_kernels_does_not_depend_on_the_number_of_parameters() -> None:
    few, many = operations([2, 3]), operations([200, 300])
    assert few == many
    assert len(few) < 20


def test_a_norm_in_host_memory_is_copied_to_the_accelerator() -> None:
    """Check the norm of a gradient that a user has set from a tensor in host memory."""
    optimizer = SimpleNamespace(fp16_groups=[["param"]], get_param_id=hash, norm_for_param_grads={})
    optimizer.norm_for_param_grads[hash("param")] = torch.ones((), dtype=torch.float64)
    with mock.patch.object(ours, "get_accelerator", return_value=mock.Mock(current_device_name=lambda: "meta")):
        assert Norms(optimizer)._by_param().device == torch.device("meta")
