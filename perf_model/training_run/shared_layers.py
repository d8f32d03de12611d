"""Define ``SharedLayers``: layers of a model that share their parameters, as ``share_layers`` prepares them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perf_model.json_input import shorten

_LAYER_LIST = re.compile(r"(.*?)\.\d+\.")


@dataclass(frozen=True, kw_only=True)
class SharedLayers:
    """``count`` layers in the list ``path``, of which only the first ``every`` have parameters.

    Layer ``i`` uses those of layer ``i % every``.
    """

    path: str
    count: int
    every: int

    @classmethod
    def find(cls, names: Sequence[str], path: str, every: int) -> SharedLayers:
        """Return the layers in the list ``path`` of a model whose parameters have these ``names``.

        Raise ``ValueError`` if there is no such list, or if ``every`` is impossible for it.
        """
        count = len({index for name in names if (index := _index_in(path, name)) is not None})
        if count == 0:
            lists = dict.fromkeys(found[1] for name in names if (found := _LAYER_LIST.match(name)))
            raise ValueError(
                f"--share-layers: must name a list of layers, found {shorten(path)}, which is none.\n"
                f"The model has {', '.join(lists) or 'none'}."
            )
        if not 1 <= every < count:
            raise ValueError(
                f"--every: must be at least 1 and less than the number of layers, {count}, found {every}.\n"
                f"With 1, the default, all layers share the parameters of the first one."
            )
        return cls(path=path, count=count, every=every)

    def source(self, name: str) -> str:
        """Return the name of the parameter that is used in the place of ``name``."""
        index = _index_in(self.path, name)
        if index is None:
            return name
        return f"{self.path}.{index % self.every}{name[len(f'{self.path}.{index}') :]}"

    def has(self, name: str) -> bool:
        """Return whether the parameter ``name`` is in a layer that shares its parameters."""
        return _index_in(self.path, name) is not None

    def uses_of(self, name: str) -> int:
        """Return how many layers use the parameter ``name``: one for a parameter outside of the layers."""
        index = _index_in(self.path, name)
        return 1 if index is None else len(range(index % self.every, self.count, self.every))

    def in_order_of_use(self, names: Iterable[str]) -> list[str]:
        """Return ``names``, which are in the order of their first use, once for each use."""
        before: list[str] = []
        after: list[str] = []
        layers: dict[int, list[str]] = {index: [] for index in range(self.every)}
        for name in names:
            index = _index_in(self.path, name)
            if index is not None:
                layers[index].append(name)
            else:
                (after if layers[0] else before).append(name)
        return [*before, *(name for layer in range(self.count) for name in layers[layer % self.every]), *after]


def _index_in(path: str, name: str) -> int | None:
    """Return the number of the layer in the list ``path`` that has the parameter ``name``; None if none has it."""
    if not name.startswith(f"{path}."):
        return None
    number, dot, _ = name[len(path) + 1 :].partition(".")
    return int(number) if dot and number.isdecimal() else None
