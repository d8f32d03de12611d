"""Watch the forwards of a model, and evict optimizer states from GPU memory that a forward may need.

Larger inputs are noticed before the forward. Other needs depend on values, such as the capacity of experts, and
accumulate: hence the hooks before each layer and after the last one. Layers that backward recomputes do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import is_dataclass
from typing import Any

import torch

from deep_opt_states.zero.step.gpu_memory import REMEDY, GpuMemory


class WatchedForwards:
    """The hooks that call ``evict`` before and in forwards of ``module`` that may need the memory of ``memory``."""

    def __init__(
        self, module: torch.nn.Module, memory: GpuMemory, evict: Callable[[str], None], resources: ExitStack
    ) -> None:
        self._memory, self._evict = memory, evict
        self._largest: dict[tuple[Any, ...], tuple[int, int]] = {}
        """The most elements and the longest dimension of each argument so far, with gradients and without."""
        self._most_bytes, self._is_in_forward = 0, False
        before_layer = torch.compiler.disable(self._before_layer)
        for hook in (
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True),
            # Also after an error: backward must not find that a forward is running.
            module.register_forward_hook(self._after_forward, always_call=True),
            # Before DeepSpeed's own hook, which gathers the parameters of the layer.
            *(layer.register_forward_pre_hook(before_layer, prepend=True) for layer in layers_of(module)),
        ):
            resources.callback(hook.remove)

    def _before_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self._memory.has_failed:
            self._evict(f"after an allocation has failed. {REMEDY}")
        if self._may_need_more((args, kwargs)):
            self._evict("before a forward that may need more than any before")
        self._memory.begin_forward()
        self._is_in_forward = True

    def _before_layer(self, layer: torch.nn.Module, args: Any) -> None:
        if self._is_in_forward and self._memory.is_short_now():
            self._evict("in a forward that has taken half of gpu_memory_margin_gb")

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        # After an error, there is no output, and the next forward finds a failed allocation.
        if output is not None:
            self._before_layer(module, args)
        self._is_in_forward = False

    def _may_need_more(self, inputs: Any) -> bool:
        """Return whether inputs are larger than before, or more memory is in use; False for the first forward."""
        sizes = _sizes(inputs, ())
        sizes[("all",)] = sum(numel for numel, _ in sizes.values()), 0
        is_first, is_larger = not self._largest, False
        for path, (numel, length) in sizes.items():
            # Attention may need memory that grows with the square of the length.
            key = (torch.is_grad_enabled(), *path)
            most, longest = self._largest.get(key, (-1, -1))
            is_larger |= numel > most or length > longest
            self._largest[key] = max(numel, most), max(length, longest)
        in_use = self._memory.of_training.bytes_in_use()
        has_grown = in_use > self._most_bytes + self._memory.budget.margin_bytes // 4
        self._most_bytes = in_use if is_first or has_grown else self._most_bytes
        return not is_first and (is_larger or has_grown)


def layers_of(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules in the outermost lists inside ``module``, which are the layers of nearly every model."""
    for child in module.children():
        is_list = isinstance(child, torch.nn.ModuleList | torch.nn.Sequential)
        yield from child.children() if is_list else layers_of(child)


def _sizes(value: Any, path: tuple[Any, ...]) -> dict[tuple[Any, ...], tuple[int, int]]:
    """Return the elements and the longest dimension of each tensor in ``value``, by its path in it."""
    if isinstance(value, torch.Tensor):
        return {path: (value.numel(), max(value.shape, default=0))}
    if is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value if isinstance(value, tuple | list) else ())
    return {found: size for name, entry in pairs for found, size in _sizes(entry, (*path, name)).items()}
