"""Define ``ModelShape``: the shape of a decoder-only transformer, which determines its parameters and its arithmetic.

Floating-point operations are counted as in Megatron-LM (arXiv 2104.04473, section 5.1, equations 2 to 4). The equations
are generalised to any feed-forward width, grouped key-value heads and gated feed-forwards; for the shapes of the paper
they give the numbers of the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

from perf_model.json_input import shorten


class ModelError(ValueError):
    """A model or a job that cannot be planned for: the rule, the value found, the remedy."""


MAX_SIZES = {
    "layers": 2_000,
    "hidden": 10**6,
    "heads": 10**5,
    "kv_heads": 10**5,
    "head_dim": 10**6,
    "intermediate": 10**8,
    "vocab": 10**8,
    "learned_positions": 10**8,
}
"""More than any model has. Typos are rejected, because planning for them would take hours."""

MAX_PARAMETERS = 10**14


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The shape of a decoder-only transformer.

    ``bias`` belongs to every linear layer, ``qkv_bias`` only to query, key and value. ``norm_params_per_hidden`` is 1
    for RMSNorm and 2 for LayerNorm. Raise ``ModelError`` for an impossible shape.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    gated: bool = True
    tied_embeddings: bool = False
    bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    norm_params_per_hidden: int = 1
    learned_positions: int = 0

    def __post_init__(self) -> None:
        for key, most in MAX_SIZES.items():
            least = 0 if key == "learned_positions" else 1
            require_integer(key, getattr(self, key), least, most, "Correct the model's shape.")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"kv_heads: must divide heads, found {self.kv_heads} for {self.heads}.\nCorrect the model's shape."
            )
        if self.numel > MAX_PARAMETERS:
            rule = f"parameters: must be at most {MAX_PARAMETERS:,} in all, found {self.numel:,}"
            raise ModelError(f"{rule}.\nCorrect the model's shape.")

    def parameters(self) -> list[tuple[str, int]]:
        """Return the name and the number of elements of each parameter, as in Hugging Face's Llama, in its order."""
        tensors = [("model.embed_tokens.weight", self.vocab * self.hidden)]
        if self.learned_positions:
            tensors.append(("model.embed_positions.weight", self.learned_positions * self.hidden))
        for layer in range(self.layers):
            of_layer = [*self._attention(), *self._feed_forward()]
            for name in ("input_layernorm", "post_attention_layernorm"):
                of_layer += self._norm(name)
            tensors += [(f"model.layers.{layer}.{name}", numel) for name, numel in of_layer]
        tensors += [(f"model.{name}", numel) for name, numel in self._norm("norm")]
        if not self.tied_embeddings:
            tensors.append(("lm_head.weight", self.vocab * self.hidden))
        return tensors

    def first_use(self) -> list[str]:
        """Return the names of the parameters in the order in which forward first uses them."""
        modules = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")

        def position(name: str) -> tuple[int, int]:
            path = name.split(".")
            if path[1] == "layers":
                return int(path[2]), modules.index(path[3])
            return (-1, 0) if path[1].startswith("embed") else (self.layers, 0)

        return sorted((name for name, _ in self.parameters()), key=position)

    @property
    def aliases(self) -> dict[str, str]:
        """Return each further name of a tied parameter, with the name that it has in ``parameters``."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.tied_embeddings else {}

    @property
    def numel(self) -> int:
        """Return the number of parameters of the model."""
        return sum(numel for _, numel in self.parameters())

    def forward_flops(self, batch: int, sequence: int) -> float:
        """Return the multiplications and additions of all matrix products for ``batch`` sequences in forward."""
        tokens = batch * sequence
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        feed_forward = (3 if self.gated else 2) * self.hidden * self.intermediate
        scores = 2 * sequence * self.heads * self.head_dim
        layers = self.layers * 2 * (attention + feed_forward + scores)
        return float(tokens) * (layers + 2 * self.hidden * self.vocab)

    def iteration_flops(self, batch: int, sequence: int, recompute: bool) -> float:
        """Return the operations of forward and backward, which is twice forward.

        With activation recomputation, the forward of the layers is added once more.
        """
        forward = self.forward_flops(batch, sequence)
        again = forward - 2.0 * batch * sequence * self.hidden * self.vocab if recompute else 0.0
        return 3 * forward + again

    def _attention(self) -> list[tuple[str, int]]:
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        tensors = []
        for name, width in (("q", query), ("k", key_value), ("v", key_value)):
            tensors += _linear(f"self_attn.{name}_proj", self.hidden, width, bias=self.bias or self.qkv_bias)
        tensors += _linear("self_attn.o_proj", query, self.hidden, bias=self.bias)
        if self.qk_norm:
            tensors += [(f"self_attn.{name}_norm.weight", self.head_dim) for name in ("q", "k")]
        return tensors

    def _feed_forward(self) -> list[tuple[str, int]]:
        tensors = []
        for name in ("gate", "up") if self.gated else ("up",):
            tensors += _linear(f"mlp.{name}_proj", self.hidden, self.intermediate, bias=self.bias)
        return tensors + _linear("mlp.down_proj", self.intermediate, self.hidden, bias=self.bias)

    def _norm(self, name: str) -> list[tuple[str, int]]:
        return [(f"{name}.{kind}", self.hidden) for kind in ("weight", "bias")[: self.norm_params_per_hidden]]


def _linear(name: str, inputs: int, outputs: int, *, bias: bool) -> list[tuple[str, int]]:
    return [(f"{name}.weight", inputs * outputs), *([(f"{name}.bias", outputs)] if bias else [])]


def require_integer(key: str, value: object, least: int, most: int, remedy: str) -> int:
    """Return ``value``. Raise ``ModelError`` unless it is an integer from ``least`` to ``most``."""
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    raise ModelError(f"{key}: must be an integer from {least} to {most:,}, found {shorten(value)}.\n{remedy}")


def divide_among_heads(hidden: int, heads: int) -> int:
    """Return the width of each head if the heads share ``hidden``. Raise ``ModelError`` if they cannot."""
    if hidden % heads:
        rule = f"hidden: must be a multiple of heads if they share it, found {hidden} for {heads}"
        raise ModelError(f"{rule}.\nCorrect the model's shape, or give head_dim if it is independent of hidden.")
    return hidden // heads


def gpt(name: str, layers: int, hidden: int, heads: int, vocab: int, positions: int) -> ModelShape:
    """Return a GPT as in the Megatron-LM paper: feed-forward of four times the width, biases, tied embeddings.

    ``positions`` is the number of learned position embeddings, 0 for rotary ones.
    """
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=divide_among_heads(hidden, heads),
        intermediate=4 * hidden,
        vocab=vocab,
        gated=False,
        tied_embeddings=True,
        bias=True,
        norm_params_per_hidden=2,
        learned_positions=positions,
    )
