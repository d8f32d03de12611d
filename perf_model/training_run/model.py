"""Define ``ModelShape``: the parameters of a transformer, which determine its memory and its arithmetic.

Floating-point operations are counted as in Megatron-LM (arXiv 2104.04473, section 5.1, equations 2 to 4). The equations
are generalised to any list of matrices; for the shapes of the paper they give the numbers of the paper. Attention
counts all tokens of the sequence, also where a model has a sliding window: ``scaled_dot_product_attention`` of PyTorch,
the default of transformers, computes the products outside the window, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from perf_model.json_input import shorten
from perf_model.training_run.shared_layers import SharedLayers
from perf_model.units import billions


class ModelError(ValueError):
    """A model or a job that cannot be planned for: the rule, the value found, the remedy."""


MAX_SIZES = {
    "layers": 2_000,
    "hidden": 10**6,
    "intermediate": 10**8,
    "vocab": 10**8,
}
"""More than any model has. Typos are rejected, because planning for them would take hours."""

MAX_PARAMETERS = 10**14


class ParameterShape(NamedTuple):
    """A parameter of a model.

    ``active_numel`` are the elements that a token uses: of the weights of routed experts, those of the experts that the
    token is routed to. ``multiplied``: the parameter is a matrix that each token is multiplied by, and no bias, norm or
    table that is looked up.
    """

    name: str
    numel: int
    active_numel: int
    multiplied: bool


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The parameters of a transformer, in the order in which its modules register them.

    ``intermediate`` is the width of the feed-forward that a token passes, over all experts that it is routed to.
    ``heads``, ``kv_heads``, ``head_dim`` and ``intermediate`` are 0 if they are unknown. ``scores_width`` is the sum of
    the widths of queries and values over heads and layers. ``tied`` has each further name of a tied parameter with the
    name that it has in ``tensors``. ``shared`` are layers that share their parameters, None if each has its own: a
    shared parameter is in ``tensors`` once, and ``layers`` counts all. ``source`` is the origin of the figures. Raise
    ``ModelError`` for more than ``MAX_PARAMETERS``.
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

    def __post_init__(self) -> None:
        if self.numel > MAX_PARAMETERS:
            rule = f"parameters: must be at most {MAX_PARAMETERS:,} in all, found {self.numel:,}"
            raise ModelError(f"{rule}.\nCorrect the model's shape.")

    def share_layers(self, path: str, every: int) -> ModelShape:
        """Return the model in which layer ``i`` of the list ``path`` has the parameters of layer ``i % every``.

        Raise ``ModelError`` if there is no such list, or if the layers that would share parameters are not equal.
        """
        names = [tensor.name for tensor in self.tensors]
        try:
            shared = SharedLayers.find(names, path, every)
        except ValueError as error:
            raise ModelError(str(error)) from None
        by_name = {tensor.name: tensor for tensor in self.tensors}
        for tensor in self.tensors:
            source = by_name.get(shared.source(tensor.name))
            if source is None or source[1:] != tensor[1:]:
                raise ModelError(
                    f"--share-layers: must name layers with equal parameters, found {tensor.name} with "
                    f"{tensor.numel:,} elements, and {shared.source(tensor.name)} with "
                    f"{0 if source is None else source.numel:,} or of another kind.\n"
                    f"Give another --every, so that equal layers share."
                )
        return replace(
            self,
            name=f"{self.name}, {shared.count} layers with the parameters of {every}",
            tensors=tuple(tensor for tensor in self.tensors if shared.source(tensor.name) == tensor.name),
            shared=shared,
        )

    def parameters(self) -> list[tuple[str, int]]:
        """Return the name and the number of elements of each parameter, in the order of the model."""
        return [(tensor.name, tensor.numel) for tensor in self.tensors]

    @property
    def description(self) -> str:
        """Return the name and the numbers of parameters: ``Mixtral (46.70 B parameters, 12.88 B active)``."""
        active = "" if self.active_numel == self.numel else f", {billions(self.active_numel)} active"
        return f"{self.name} ({billions(self.numel)} parameters{active})"

    def first_use(self) -> list[str]:
        """Return the names of the parameters in the order in which forward first uses them."""
        return order_of_first_use([tensor.name for tensor in self.tensors])

    def uses(self) -> list[str]:
        """Return the names of the parameters in the order in which forward uses them, for each use.

        Tied parameters are used last, by the head.
        """
        first_uses = self.first_use()
        uses = first_uses if self.shared is None else self.shared.in_order_of_use(first_uses)
        return [*uses, *(first for _, first in self.tied)]

    def uses_of(self, name: str) -> int:
        """Return how many layers use the parameter ``name``."""
        return 1 if self.shared is None else self.shared.uses_of(name)

    @property
    def aliases(self) -> dict[str, str]:
        """Return each further name of a tied parameter, with the name that it has in ``parameters``."""
        return dict(self.tied)

    @cached_property
    def gated(self) -> bool:
        """Return whether the feed-forward multiplies its input with a gate, by a matrix of its own or a fused one."""
        return any("gate_proj" in tensor.name or "gate_up" in tensor.name for tensor in self.tensors)

    @cached_property
    def has_layer_norm(self) -> bool:
        """Return whether the norms have biases, as LayerNorm has and RMSNorm has not."""
        return any(tensor.name.endswith(_NORM_BIASES) for tensor in self.tensors)

    @cached_property
    def numel(self) -> int:
        """Return the number of parameters of the model."""
        return sum(tensor.numel for tensor in self.tensors)

    @cached_property
    def active_numel(self) -> int:
        """Return the number of parameters that a token uses: fewer than ``numel`` if the model has routed experts."""
        return sum(tensor.active_numel for tensor in self.tensors)

    @cached_property
    def multiplied_numel(self) -> int:
        """Return the number of elements of the matrices that a token is multiplied by, for each use of a matrix."""
        return sum(tensor.active_numel * self.uses_of(tensor.name) for tensor in self.tensors if tensor.multiplied)

    def forward_flops(self, batch: int, sequence: int) -> float:
        """Return the multiplications and additions of all matrix products for ``batch`` sequences in forward.

        Of a mixture of experts, the products with the experts that a token is routed to count.
        """
        tokens = batch * sequence
        return 2.0 * tokens * (self.multiplied_numel + sequence * self.scores_width)

    def iteration_flops(self, batch: int, sequence: int, recompute: bool) -> float:
        """Return the operations of forward and backward; backward takes twice as many as forward.

        With activation recomputation, the forward of the layers is added once more.
        """
        return iteration_flops(
            self.forward_flops(batch, sequence), 2.0 * batch * sequence * self.hidden * self.vocab, recompute
        )


def iteration_flops(forward_flops: float, logits_flops: float, recompute: bool) -> float:
    """Return the operations of forward and backward; the product of the logits is not recomputed."""
    return 3 * forward_flops + (forward_flops - logits_flops if recompute else 0.0)


LAST_PRODUCTS = ("down_proj", "c_proj", "dense_4h_to_h", "fc2")
"""Parts of the names of the matrices at the end of a feed-forward."""

_LAYER = re.compile(r"(.*?\.(?:layers|h))\.([0-9]+)\.([^.]+)")

_NORM_BIASES = ("norm.bias", "layernorm.bias", "ln_1.bias", "ln_f.bias", "layer_norm.bias")

_MODULES_IN_FORWARD = (
    "ln_1",
    "input_layernorm",
    "self_attn",
    "attn",
    "attention",
    "post_attention_layernorm",
    "ln_2",
    "pre_feedforward_layernorm",
    "mlp",
    "post_feedforward_layernorm",
)
"""The modules of a decoder layer in the order of forward. Modules register norms before or after the others."""


def layer_and_module(name: str) -> tuple[int, str] | None:
    """Return the number of the layer that has the parameter ``name``, and the module in it; None outside of layers."""
    found = _LAYER.match(name)
    return None if found is None else (int(found[2]), found[3])


def order_of_first_use(names: list[str]) -> list[str]:
    """Return ``names``, which are in the order of registration, in the order in which forward first uses them.

    The parameters before the first layer and those after the last one stay where they are, and so do the modules of a
    layer that are unknown.
    """

    def position(index: int) -> tuple[int, int]:
        match = _LAYER.match(names[index])
        if match is None or match[3] not in _MODULES_IN_FORWARD:
            return (index, 0)
        return (first_of_layer[match[1], match[2]], _MODULES_IN_FORWARD.index(match[3]))

    first_of_layer: dict[tuple[str, str], int] = {}
    for index, name in enumerate(names):
        if match := _LAYER.match(name):
            first_of_layer.setdefault((match[1], match[2]), index)
    return [names[index] for index in sorted(range(len(names)), key=position)]


_WITHOUT_WEIGHT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|\.ln_(?:1|2|f)\.")


def has_weight_decay(name: str) -> bool:
    """Return whether Hugging Face's Trainer gives weight decay to a parameter (``get_decay_parameter_names``).

    Norms and biases have none. The Trainer recognises most norms by name, and those of GPT-2 by their type.
    """
    return _WITHOUT_WEIGHT_DECAY.search(name.lower()) is None


def require_integer(key: str, value: object, least: int, most: int, remedy: str) -> int:
    """Return ``value``. Raise ``ModelError`` unless it is an integer from ``least`` to ``most``."""
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    raise ModelError(f"{key}: must be an integer from {least} to {most:,}, found {shorten(value)}.\n{remedy}")
