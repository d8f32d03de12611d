"""Notice forwards that may need more memory than any before, by their inputs and by the memory in use before them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


class LargerForwards:
    """A pre-forward hook that calls ``give_memory_back`` before a forward that may need more memory than all before.

    A longer sequence or a larger batch needs more memory for activations. The memory that is left free at the peak of
    smaller inputs may not be enough, and PyTorch reports the error only when it is too late. Inputs are larger if one
    of them has more elements, or a longer dimension, than the same argument had before: attention may need memory that
    grows with the square of the length. They are larger, too, if all of them together have more elements. Forwards
    with and without gradients are compared separately, because they need different amounts of memory for the same
    inputs. The first forward of all does not count: at that time the plan holds no memory, or as much as the config
    asks for.

    Some needs do not show in the inputs, such as a cache of keys and values that grows with each generated token, or
    tensors in objects other than tuples, lists, mappings and dataclasses. They show in ``bytes_in_use()``, the memory
    that training has allocated. A forward that begins with more than ``tolerance_bytes`` above the most so far is
    larger, too.
    """

    def __init__(
        self, give_memory_back: Callable[[], object], bytes_in_use: Callable[[], int], tolerance_bytes: int
    ) -> None:
        self._give_memory_back = give_memory_back
        self._bytes_in_use = bytes_in_use
        self._tolerance_bytes = tolerance_bytes
        self._largest: dict[tuple[Any, ...], tuple[int, int]] = {}
        """The most elements and the longest dimension so far of each argument, with gradients and without."""
        self._most_bytes = 0
        """The most memory in use at the beginning of a forward, not counting growth within the tolerance."""

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the inputs and the memory in use with those of earlier forwards."""
        is_first = not self._largest
        has_larger_inputs = self._has_larger_inputs((args, kwargs))
        bytes_in_use = self._bytes_in_use()
        has_grown = bytes_in_use > self._most_bytes + self._tolerance_bytes
        if is_first or has_grown:
            self._most_bytes = bytes_in_use
        if not is_first and (has_larger_inputs or has_grown):
            self._give_memory_back()

    def _has_larger_inputs(self, inputs: Any) -> bool:
        """Return whether inputs are larger than all before, and remember their size."""
        found: dict[tuple[Any, ...], tuple[int, int]] = {
            path: (tensor.numel(), max(tensor.shape, default=0)) for path, tensor in _tensors(inputs, ())
        }
        found[("all",)] = sum(elements for elements, _ in found.values()), 0
        larger = False
        for path, (elements, length) in found.items():
            key = (torch.is_grad_enabled(), *path)
            most, longest = self._largest.get(key, (-1, -1))
            self._largest[key] = max(elements, most), max(length, longest)
            larger = larger or elements > most or length > longest
        return larger


def _tensors(value: Any, path: tuple[Any, ...]) -> Iterable[tuple[tuple[Any, ...], torch.Tensor]]:
    """Yield the tensors in nested tuples, lists, mappings and dataclasses, each with its path in them."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        entries = value.items()
    elif isinstance(value, (tuple, list)):
        entries = enumerate(value)
    elif is_dataclass(value) and not isinstance(value, type):
        entries = ((field.name, getattr(value, field.name)) for field in fields(value))
    for name, entry in entries:
        yield from _tensors(entry, (*path, name))
