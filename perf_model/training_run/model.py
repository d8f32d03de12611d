"""Define ``ModelShape``, the parameters of a transformer, which determine its memory and its arithmetic.

Operations are counted as in Megatron-LM (arXiv 2104.04473, section 5.1, equations 2 to 4). Attention counts all tokens,
also with a sliding window, because PyTorch's ``scaled_dot_product_attention`` computes them all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from perf_model.json_input import shorten
from perf_model.units import billions

MAX_SIZES = {"layers": 2_000, "hidden": 10**6, "vocab": 10**8}
"""Larger values are typos, and planning for them would take hours."""


class ModelError(ValueError):
    """A model or a job that cannot be planned for: the rule, the value found and the remedy."""


class ParameterShape(NamedTuple):
    """A parameter, with the ``active_numel`` elements that a token uses, fewer than ``numel`` in routed experts.

    ``multiplied``: it is a matrix that each token is multiplied by, and not a bias, norm or table.
    """

    name: str
    numel: int
    active_numel: int
    multiplied: bool


@dataclass(frozen=True, kw_only=True)
class SharedLayers:
    """``count`` layers in the list ``path``, of which layer ``i`` uses the parameters of layer ``i % every``."""

    path: str
    count: int
    every: int

    def source(self, name: str) -> str:
        """Return the name of the parameter that is used for ``name``."""
        layer = layer_in(self.path, name)
        if layer is None:
            return name
        return f"{self.path}.{layer % self.every}{name.removeprefix(f'{self.path}.{layer}')}"

    def uses_of(self, name: str) -> int:
        """Return how many layers use the parameter ``name``, 1 for one outside of the layers."""
        layer = layer_in(self.path, name)
        return 1 if layer is None else len(range(layer, self.count, self.every))


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The parameters of a transformer, in the order in which its modules register them.

    ``intermediate`` is the width of the feed-forward that a token passes, over all of its experts. Sizes that are
    unknown are 0. ``scores_width`` is the sum of the widths of queries and values over heads and layers. ``tied`` pairs
    each further name of a tied parameter with its name in ``tensors``. ``tensors`` contains a parameter of ``shared``
    layers once, and ``layers`` counts them all.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    scores_width: int
    tensors: tuple[ParameterShape, ...]
    tied: tuple[tuple[str, str], ...] = ()
    source: str = ""
    shared: SharedLayers | None = None

    def share_layers(self, path: str, every: int) -> ModelShape:
        """Return the model in which layer ``i`` of the list ``path`` has the parameters of layer ``i % every``.

        Raise ``ModelError`` if there is no such list, or if these layers are not equal.
        """
        count = len({layer_in(path, tensor.name) for tensor in self.tensors} - {None})
        if count == 0:
            found = (re.match(r"(.*?)\.\d+\.", tensor.name) for tensor in self.tensors)
            lists = ", ".join(dict.fromkeys(match[1] for match in found if match)) or "none"
            rule = f"--share-layers: must name a list of layers, found {shorten(path)}, which is none"
            raise ModelError(f"{rule}.\nThe model has {lists}.")
        if not 1 <= every < count:
            rule = f"--every: must be at least 1 and less than the number of layers, {count}, found {every}"
            raise ModelError(f"{rule}.\nWith 1, the default, all layers share the parameters of the first one.")
        shared = SharedLayers(path=path, count=count, every=every)
        by_name = {tensor.name: tensor[1:] for tensor in self.tensors}
        for tensor in self.tensors:
            source = shared.source(tensor.name)
            if by_name.get(source) != tensor[1:]:
                rule = f"--share-layers: must name layers with equal parameters, found {tensor.name} unlike {source}"
                raise ModelError(f"{rule}.\nGive another --every, so that equal layers share.")
        return replace(
            self,
            name=f"{self.name}, {count} layers with the parameters of {every}",
            tensors=tuple(tensor for tensor in self.tensors if shared.source(tensor.name) == tensor.name),
            shared=shared,
        )

    def parameters(self) -> list[tuple[str, int]]:
        return [(tensor.name, tensor.numel) for tensor in self.tensors]

    @property
    def description(self) -> str:
        """Return the name and the numbers of parameters: ``Mixtral (46.70 B parameters, 12.88 B active)``."""
        active = "" if self.active_numel == self.numel else f", {billions(self.active_numel)} active"
        return f"{self.name} ({billions(self.numel)} parameters{active})"

    def first_use(self) -> list[str]:
        """Return the names of the parameters in the order in which forward first uses them."""
        # Parameters outside of layers and in unknown modules stay where they are registered.
        positions: dict[str, tuple[int, int]] = {}
        first_of_layer: dict[tuple[str, str], int] = {}
        for index, tensor in enumerate(self.tensors):
            positions[tensor.name] = index, 0
            # A model may have several lists of layers, such as a vision tower and a language model.
            if found := _LAYER.match(tensor.name):
                first = first_of_layer.setdefault((found[1], found[2]), index)
                if found[3] in _MODULES_IN_FORWARD:
                    positions[tensor.name] = first, _MODULES_IN_FORWARD.index(found[3])
        return sorted(positions, key=lambda name: positions[name])

    def uses(self) -> list[str]:
        """Return the names of the parameters in the order in which forward uses them, once per use."""
        uses, shared = self.first_use(), self.shared
        if shared is not None:
            layers = {name: layer for name in uses if (layer := layer_in(shared.path, name)) is not None}
            begin = uses.index(next(iter(layers)))
            passes = [*layers] * (shared.count // shared.every)
            rest = [name for name, layer in layers.items() if layer < shared.count % shared.every]
            uses = [*uses[:begin], *passes, *rest, *uses[begin + len(layers) :]]
        return [*uses, *(first for _, first in self.tied)]

    @cached_property
    def numel(self) -> int:
        return sum(tensor.numel for tensor in self.tensors)

    @cached_property
    def active_numel(self) -> int:
        return sum(tensor.active_numel for tensor in self.tensors)

    @cached_property
    def multiplied_numel(self) -> int:
        """Return the elements of the matrices that a token is multiplied by, once per use."""
        uses_of = (lambda name: 1) if self.shared is None else self.shared.uses_of
        return sum(tensor.active_numel * uses_of(tensor.name) for tensor in self.tensors if tensor.multiplied)

    @cached_property
    def modules(self) -> int:
        """Return the number of modules with parameters, counted once per use."""
        paths = {tensor.name[: dot.end()] for tensor in self.tensors for dot in re.finditer(r"\.", tensor.name)}
        return sum(1 if self.shared is None else self.shared.uses_of(path) for path in paths)

    def forward_flops(self, batch: int, sequence: int) -> float:
        """Return the operations of all matrix products in forward for ``batch`` sequences."""
        return 2.0 * batch * sequence * (self.multiplied_numel + sequence * self.scores_width)

    def iteration_flops(self, batch: int, sequence: int, recompute: bool) -> float:
        """Return the operations of forward and backward. ``recompute`` adds a second forward without the logits."""
        forward_flops = self.forward_flops(batch, sequence)
        logits_flops = 2.0 * batch * sequence * self.hidden * self.vocab
        return 3 * forward_flops + (forward_flops - logits_flops if recompute else 0.0)


LAST_PRODUCTS = ("down_proj", "c_proj", "dense_4h_to_h", "fc2")

_LAYER = re.compile(r"(.*?\.(?:layers|h))\.([0-9]+)\.([^.]+)")

_MODULES_IN_FORWARD = (
    *("ln_1", "input_layernorm", "self_attn", "attn", "attention", "post_attention_layernorm"),
    *("ln_2", "pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"),
)
"""The modules of a decoder layer in the order of forward. Modules register norms before or after the others."""


def layer_and_module(name: str) -> tuple[int, str] | None:
    """Return the number of the layer with the parameter ``name`` and its module, None outside of layers."""
    found = _LAYER.match(name)
    return None if found is None else (int(found[2]), found[3])


def mlp_width(tensors: Sequence[ParameterShape], hidden: int) -> int:
    """Return the largest width of a feed-forward that a token passes: of layers with experts, if there are any."""
    widths: dict[str, int] = {}
    for tensor in tensors:
        layer, dot, part = tensor.name.partition(".mlp.")
        if dot and tensor.multiplied and any(name in part for name in LAST_PRODUCTS):
            widths[layer] = widths.get(layer, 0) + tensor.active_numel // hidden
    with_experts = {tensor.name.partition(".mlp.")[0] for tensor in tensors if ".experts." in tensor.name}
    return max((widths[layer] for layer in with_experts & widths.keys() or widths), default=0)


def layer_in(path: str, name: str) -> int | None:
    """Return the number of the layer in the list ``path`` with the parameter ``name``, None outside of the list."""
    found = re.match(rf"{re.escape(path)}\.([0-9]+)\.", name)
    return None if found is None else int(found[1])


_WITHOUT_WEIGHT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|\.ln_(?:1|2|f)\.")


def has_weight_decay(name: str) -> bool:
    """Return whether the parameter is no norm or bias, as ``get_decay_parameter_names`` of Hugging Face's Trainer."""
    return _WITHOUT_WEIGHT_DECAY.search(name.lower()) is None


def require_integer(key: str, value: object, least: int, most: int, remedy: str) -> None:
    """Raise ``ModelError`` unless ``value`` is an integer from ``least`` to ``most``."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ModelError(f"{key}: must be an integer from {least:,} to {most:,}, found {shorten(value)}.\n{remedy}")
