"""Notice inside a forward that training takes memory which nothing before the forward has shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch

Layers = torch.nn.ModuleList | torch.nn.Sequential


class GrowingForwards:
    """Hooks that call ``give_memory_back`` inside a forward of ``module``, as soon as ``is_short`` returns True.

    Some needs depend on values: the capacity of experts follows the routing, and a model may pad, generate or compute
    another loss inside its forward. They accumulate from layer to layer, so the hooks ask before each layer, and after
    the last one, before backward. Growth inside one layer shows too late, and so does growth in backward: gradients are
    being reduced then, and the memory of the plan must not change. This excludes layers that backward recomputes, too.

    ``begin`` is called before each forward. The hooks are removed by ``resources``.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        begin: Callable[[], object],
        is_short: Callable[[], bool],
        give_memory_back: Callable[[], object],
        resources: ExitStack,
    ) -> None:
        self._begin = begin
        self._is_short = is_short
        self._give_memory_back = give_memory_back
        self._is_in_forward = False
        before_layer = torch.compiler.disable(self._before_layer)
        hooks = [
            module.register_forward_pre_hook(self._before_forward, prepend=True),
            # Always: after an error, too, backward must not find that a forward is running.
            module.register_forward_hook(self._after_forward, always_call=True),
            # Before DeepSpeed's own hook, which gathers the parameters of the layer.
            *(layer.register_forward_pre_hook(before_layer, prepend=True) for layer in layers_of(module)),
        ]
        for hook in hooks:
            resources.callback(hook.remove)

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        self._begin()
        self._is_in_forward = True

    def _before_layer(self, layer: torch.nn.Module, args: Any) -> None:
        if self._is_in_forward and self._is_short():
            self._give_memory_back()

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._is_in_forward = False
        # After an error there is no output. The next forward finds the error.
        if output is not None and self._is_short():
            self._give_memory_back()


def layers_of(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules in the outermost lists inside ``module``, which are the layers of nearly every model."""
    for child in module.children():
        yield from child.children() if isinstance(child, Layers) else layers_of(child)
