"""Check before which forwards, and between which modules of one, states are evicted, and that backward evicts none."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from deep_opt_states.zero.step.watched_forwards import WatchedForwards, layers_of

TOLERANCE = 100


@dataclass
class Batch:
    ids: torch.Tensor


class LayeredModel(torch.nn.Module):
    """A model of two layers with experts, which are no layers of the model."""

    def __init__(self) -> None:
        super().__init__()
        layers = (torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(2))
        self.base = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})
        self.raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, last = self.base["layers"]
        x = checkpoint(last, checkpoint(first, x, use_reentrant=True), use_reentrant=True)
        if self.raises:
            raise torch.OutOfMemoryError
        return x


class AnyInputs(torch.nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> None: ...


class Hooked:
    def __init__(self, model: torch.nn.Module, short_at: int = -1) -> None:
        self.model = model
        self.calls: list[str] = []
        self.bytes_in_use = 1000
        self.resources = ExitStack()
        self._short_at = short_at
        memory: Any = SimpleNamespace(
            has_failed=False,
            budget=SimpleNamespace(margin_bytes=4 * TOLERANCE),
            of_training=SimpleNamespace(bytes_in_use=lambda: self.bytes_in_use),
            begin_forward=lambda: self.calls.append("begin"),
            is_short_now=self._is_short,
        )
        WatchedForwards(model, memory, lambda reason: self.calls.append(f"evict {reason}"), self.resources)

    def _is_short(self) -> bool:
        self.calls.append("ask")
        return self.calls.count("ask") == self._short_at

    def is_larger(self, *args: Any, **kwargs: Any) -> bool:
        self.calls.clear()
        self.model(*args, **kwargs)
        return "evict before a forward that may need more than any before" in self.calls


def test_the_outermost_lists_contain_the_layers() -> None:
    model = LayeredModel()
    assert list(layers_of(model)) == list(model.base["layers"].children())
    assert list(layers_of(torch.nn.Linear(2, 2))) == []


@pytest.mark.parametrize("short_at", [1, 2, 3])
def test_memory_is_asked_for_before_each_layer_and_after_the_last_and_not_in_backward(short_at: int) -> None:
    hooked = Hooked(LayeredModel(), short_at)
    hooked.model(torch.ones(2, requires_grad=True)).sum().backward()
    asked = [call.partition(" ")[0] for call in hooked.calls]
    assert asked.index("evict") == short_at + 1
    assert [call for call in asked if call != "evict"] == ["begin", "ask", "ask", "ask"]
    hooked.resources.close()
    hooked.calls.clear()
    hooked.model(torch.ones(2))
    assert hooked.calls == []


def test_after_an_error_in_forward_backward_finds_no_forward() -> None:
    hooked = Hooked(LayeredModel())
    loss = hooked.model(torch.ones(2, requires_grad=True)).sum()
    hooked.model.raises = True
    hooked.calls.clear()
    with pytest.raises(torch.OutOfMemoryError):
        hooked.model(torch.ones(2, requires_grad=True))
    loss.backward()
    assert hooked.calls == ["begin", "ask", "ask"]


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.uint8)


def test_more_elements_or_a_longer_dimension_of_any_argument_count_and_the_first_forward_does_not() -> None:
    model = Hooked(AnyInputs())
    larger = [model.is_larger(ids(*shape)) for shape in ((4, 8), (4, 8), (2, 8), (1, 9), (5, 8), (4, 9))]
    assert larger == [False, False, False, True, True, False]
    # Forwards without gradients are compared with each other.
    with torch.no_grad():
        assert [model.is_larger(ids(1, length)) for length in (1, 1, 2)] == [True, False, True]
    model = Hooked(AnyInputs())
    for length, images, batch, larger_than_before in (
        (100, [ids(3, 64, 64)], 5, False),
        (100, [ids(3, 64, 64)], 5, False),
        # Hidden by the image; one more image; and the largest together for the first time.
        (101, [ids(3, 1, 1)], 5, True),
        (1, [ids(3, 1, 1), ids(1)], 5, True),
        (1, [ids(3, 1, 1)], 6, True),
        (101, [ids(3, 64, 64)], 5, True),
    ):
        arguments = {"input_ids": ids(1, length), "images": images, "batch": Batch(ids(batch))}
        assert model.is_larger(**arguments) == larger_than_before, (length, images, batch)


def test_memory_that_grows_beyond_the_tolerance_counts_also_in_small_amounts() -> None:
    model = Hooked(AnyInputs())
    assert not model.is_larger(ids(4))
    larger = []
    for _ in range(11):
        model.bytes_in_use += 50
        larger.append(model.is_larger(ids(4)))
    assert larger == [False, False, True] * 3 + [False, False]
    model.bytes_in_use = 1000
    assert not model.is_larger(ids(4))
