"""Notice forwards that may need more memory than any before, by their inputs and by the memory in use before them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch


class LargerForwards:
    """A pre-forward hook that calls ``give_memory_back`` before a forward that may need more memory than all before.

    A longer sequence or a larger batch needs more memory for activations. The memory that is left free at the peak of
    smaller inputs may not be enough, and PyTorch reports the error only when it is too late. Inputs are larger if they
    have more elements in total, or if a dimension of one of them is longer: attention may need memory that grows with
    the square of the length. Forwards with and without gradients are compared separately, because they need different
    amounts of memory for the same inputs. Before the first forward of all, nothing is known that memory was free for.

    Some needs do not show in the inputs, such as a cache of keys and values that grows with each generated token. They
    show in ``bytes_in_use()``, the memory that training has allocated. A forward that begins with more than
    ``tolerance_bytes`` above the most so far is larger, too.
    """

    def __init__(
        self, give_memory_back: Callable[[], object], bytes_in_use: Callable[[], int], tolerance_bytes: int
    ) -> None:
        self._give_memory_back = give_memory_back
        self._bytes_in_use = bytes_in_use
        self._tolerance_bytes = tolerance_bytes
        self._largest: dict[bool, tuple[int, int]] = {}
        """The most elements and the longest dimension so far, with gradients and without."""
        self._most_bytes = 0
        """The most memory in use at the begin of a forward, not counting growth within the tolerance."""

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
        tensors = list(_tensors(inputs))
        elements = sum(tensor.numel() for tensor in tensors)
        length = max((size for tensor in tensors for size in tensor.shape), default=0)
        with_gradients = torch.is_grad_enabled()
        most, longest = self._largest.get(with_gradients, (-1, -1))
        self._largest[with_gradients] = max(elements, most), max(length, longest)
        return elements > most or length > longest


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
