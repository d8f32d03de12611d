"""Check between which modules a growing forward evicts states, and that backward never does."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from deep_opt_states.zero.step.gpu_memory import WatchedForwards, layers_of


class Layer(torch.nn.Module):
    """A layer with experts, which are no layers of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
        self.raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.raises:
            raise torch.OutOfMemoryError
        return torch.as_tensor(self.experts[0](x))


class LayeredModel(torch.nn.Module):
    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.base = torch.nn.ModuleDict(
            {"layers": torch.nn.ModuleList([Layer(), Layer()]), "norm": torch.nn.Identity()}
        )
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.base["layers"].children():
            x = checkpoint(layer, x, use_reentrant=True) if self.checkpoints else layer(x)
        return torch.as_tensor(self.base["norm"](x))


class Hooked:
    """The hooks on a model, with what they have called in order."""

    def __init__(self, model: LayeredModel, short_at: int = -1) -> None:
        self.calls: list[str] = []
        self.asked = 0
        self.resources = ExitStack()
        self._short_at = short_at
        memory: Any = SimpleNamespace(
            has_failed=False,
            budget=SimpleNamespace(margin_bytes=0),
            of_training=SimpleNamespace(bytes_in_use=lambda: 0),
            begin_forward=lambda: self.calls.append("begin"),
            is_short_now=self._is_short,
        )
        WatchedForwards(model, memory, lambda reason: self.calls.append("evict"), self.resources)

    def _is_short(self) -> bool:
        self.asked += 1
        self.calls.append("ask")
        return self.asked == self._short_at


def test_the_outermost_lists_contain_the_layers() -> None:
    model = LayeredModel()
    assert list(layers_of(model)) == list(model.base["layers"].children())
    assert list(layers_of(torch.nn.Linear(2, 2))) == []


@pytest.mark.parametrize("short_at", [1, 2, 3])
def test_memory_is_asked_for_before_each_layer_and_after_the_last(short_at: int) -> None:
    model = LayeredModel()
    hooked = Hooked(model, short_at)
    model(torch.ones(2))
    expected = ["begin", "ask", "ask", "ask"]
    expected.insert(1 + short_at, "evict")
    assert hooked.calls == expected
    hooked.resources.close()
    model(torch.ones(2))
    assert hooked.calls == expected


def test_layers_that_backward_computes_again_do_not_count() -> None:
    model = LayeredModel(checkpoints=True)
    hooked = Hooked(model)
    loss = model(torch.ones(2, requires_grad=True)).sum()
    before = list(hooked.calls)
    loss.backward()
    assert before == hooked.calls == ["begin", "ask", "ask", "ask"]


def test_after_an_error_in_forward_backward_finds_no_forward() -> None:
    model = LayeredModel(checkpoints=True)
    hooked = Hooked(model)
    loss = model(torch.ones(2, requires_grad=True)).sum()
    last = list(model.base["layers"].children())[-1]
    last.raises = True
    hooked.calls.clear()
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.ones(2, requires_grad=True))
    assert hooked.calls == ["begin", "ask", "ask"]
    last.raises = False
    loss.backward()
    assert hooked.calls == ["begin", "ask", "ask"]
