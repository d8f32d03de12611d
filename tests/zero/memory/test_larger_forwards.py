"""Check which forwards count as larger than all before, by their inputs and by the memory in use."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from deep_opt_states.zero.step.gpu_memory import WatchedForwards

TOLERANCE = 100


@dataclass
class Batch:
    """Inputs in a dataclass."""

    ids: torch.Tensor


class AnyInputs(torch.nn.Module):
    """A model that ignores its inputs."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        pass


@dataclass
class HookedModel:
    """A model with the hook, and the memory that training uses."""

    bytes_in_use: int = 1000
    evictions: int = 0
    model: AnyInputs = field(default_factory=AnyInputs)
    resources: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        memory: Any = SimpleNamespace(
            has_failed=False,
            budget=SimpleNamespace(margin_bytes=4 * TOLERANCE),
            of_training=SimpleNamespace(bytes_in_use=lambda: self.bytes_in_use),
            begin_forward=lambda: None,
            is_short_now=lambda: False,
        )
        WatchedForwards(self.model, memory, self._evict, self.resources)

    def _evict(self, reason: str) -> None:
        assert reason == "before a forward that may need more than any before"
        self.evictions += 1

    def is_larger(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether memory is evicted before a forward with these inputs."""
        before = self.evictions
        self.model(*args, **kwargs)
        return self.evictions > before


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.uint8)


def test_more_elements_or_a_longer_dimension_count_and_the_first_forward_does_not() -> None:
    model = HookedModel()
    assert not model.is_larger(ids(4, 8))
    assert not model.is_larger(ids(4, 8))
    assert not model.is_larger(ids(2, 8))
    assert model.is_larger(ids(1, 9))
    assert model.is_larger(ids(5, 8))
    assert not model.is_larger(ids(4, 9))


def test_forwards_without_gradients_are_compared_with_each_other() -> None:
    model = HookedModel()
    model.is_larger(ids(4, 8))
    with torch.no_grad():
        assert model.is_larger(ids(1, 1))
        assert not model.is_larger(ids(1, 1))
        assert model.is_larger(ids(1, 2))
    assert not model.is_larger(ids(4, 8))


def test_each_argument_is_compared_with_itself_wherever_it_is() -> None:
    model = HookedModel()
    model.is_larger(input_ids=ids(1, 100), images=[ids(3, 64, 64)], batch=Batch(ids(5)))
    assert not model.is_larger(input_ids=ids(1, 100), images=[ids(3, 64, 64)], batch=Batch(ids(5)))
    assert model.is_larger(input_ids=ids(1, 101), images=[ids(3, 1, 1)], batch=Batch(ids(5))), "hidden by the image"
    assert model.is_larger(input_ids=ids(1, 1), images=[ids(3, 1, 1), ids(1)], batch=Batch(ids(5))), "one more image"
    assert model.is_larger(input_ids=ids(1, 1), images=[ids(3, 1, 1)], batch=Batch(ids(6)))


def test_arguments_that_are_largest_together_for_the_first_time_count() -> None:
    model = HookedModel()
    model.is_larger(ids(10), ids(1))
    assert model.is_larger(ids(1), ids(10))
    assert model.is_larger(ids(10), ids(10))
    assert not model.is_larger(ids(10), ids(10))


def test_memory_that_grows_beyond_the_tolerance_counts_also_in_small_amounts() -> None:
    model = HookedModel()
    assert not model.is_larger(ids(4))
    larger = []
    for _ in range(11):
        model.bytes_in_use += 50
        larger.append(model.is_larger(ids(4)))
    assert larger == [False, False, True] * 3 + [False, False]
    model.bytes_in_use = 1000
    assert not model.is_larger(ids(4))
