"""Notice forwards that may need more memory than any before, by the size of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch


class LargerInputs:
    """A pre-forward hook that calls ``give_memory_back`` before a forward whose inputs are larger than all before.

    A longer sequence or a larger batch needs more memory for activations. The memory that is left free at the peak of
    smaller inputs may not be enough, and PyTorch reports the error only when it is too late. Inputs are larger if they
    have more elements in total, or if a dimension of one of them is longer: attention may need memory that grows with
    the square of the length. Forwards with and without gradients are compared separately, because they need different
    amounts of memory for the same inputs. Before the first forward of all, nothing is known that memory was free for.
    """

    def __init__(self, give_memory_back: Callable[[], object]) -> None:
        self._give_memory_back = give_memory_back
        self._largest: dict[bool, tuple[int, int]] = {}
        """The most elements and the longest dimension so far, with gradients and without."""

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the inputs with those of earlier forwards."""
        tensors = list(_tensors((args, kwargs)))
        elements = sum(tensor.numel() for tensor in tensors)
        length = max((size for tensor in tensors for size in tensor.shape), default=0)
        with_gradients = torch.is_grad_enabled()
        is_first = not self._largest
        most, longest = self._largest.get(with_gradients, (-1, -1))
        self._largest[with_gradients] = max(elements, most), max(length, longest)
        if not is_first and (elements > most or length > longest):
            self._give_memory_back()


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _tensors(entry)
