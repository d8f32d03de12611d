"""``ModelShape``: a decoder-only transformer as far as its parameters and its arithmetic go.

Floating-point operations are those of Megatron-LM (arXiv 2104.04473, section 5.1, equations 2 to 4), written for any
feed-forward width, grouped key-value heads and gated feed-forwards; for its own shapes they give its own numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from perf_model.json_input import shown


class ModelError(ValueError):
    """A model that cannot be planned for: the rule, the value found, the remedy."""


MOST = {
    "layers": 2_000,
    "hidden": 10**6,
    "heads": 10**5,
    "kv_heads": 10**5,
    "head_dim": 10**6,
    "intermediate": 10**8,
    "vocab": 10**8,
    "learned_positions": 10**8,
}
"""More than any model has; a slip of the pen is refused, and not planned for hours."""

MOST_PARAMETERS = 10**14


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """``bias`` is of every linear layer, ``qkv_bias`` of query, key and value alone.

    ``norm_params_per_hidden``: 1 for RMSNorm, 2 for LayerNorm. Raises ``ModelError`` for an impossible shape.
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
        for key, most in MOST.items():
            least = 0 if key == "learned_positions" else 1
            require_integer(key, getattr(self, key), least, most, "Correct the model's shape.")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"kv_heads: must divide heads, found {self.kv_heads} for {self.heads}.\nCorrect the model's shape."
            )
        if self.numel > MOST_PARAMETERS:
            rule = f"parameters: must be at most {MOST_PARAMETERS:,} in all, found {self.numel:,}"
            raise ModelError(f"{rule}.\nCorrect the model's shape.")

    def parameters(self) -> list[int]:
        """Numbers of elements of the parameter tensors, in Hugging Face's order for Llama and its like."""
        norm = [self.hidden] * self.norm_params_per_hidden
        tensors = [self.vocab * self.hidden]
        if self.learned_positions:
            tensors.append(self.learned_positions * self.hidden)
        for _ in range(self.layers):
            tensors += [*self._attention(), *self._feed_forward(), *norm, *norm]
        tensors += norm
        if not self.tied_embeddings:
            tensors.append(self.vocab * self.hidden)
        return tensors

    @property
    def numel(self) -> int:
        return sum(self.parameters())

    def forward_flops(self, batch: int, sequence: int) -> float:
        """Multiplications and additions of matrix products; ``batch`` sequences of ``sequence`` tokens."""
        tokens = batch * sequence
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        feed_forward = (3 if self.gated else 2) * self.hidden * self.intermediate
        scores = 2 * sequence * self.heads * self.head_dim
        layers = self.layers * 2 * (attention + feed_forward + scores)
        return float(tokens) * (layers + 2 * self.hidden * self.vocab)

    def iteration_flops(self, batch: int, sequence: int, recompute: bool) -> float:
        """Forward and backward, which is twice forward; with activation recomputation the layers' forward again."""
        forward = self.forward_flops(batch, sequence)
        again = forward - 2.0 * batch * sequence * self.hidden * self.vocab if recompute else 0.0
        return 3 * forward + again

    def _attention(self) -> list[int]:
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        tensors = []
        for width in (query, key_value, key_value):
            tensors.append(self.hidden * width)
            if self.bias or self.qkv_bias:
                tensors.append(width)
        tensors.append(query * self.hidden)
        if self.bias:
            tensors.append(self.hidden)
        if self.qk_norm:
            tensors += [self.head_dim, self.head_dim]
        return tensors

    def _feed_forward(self) -> list[int]:
        tensors = []
        for _ in range(2 if self.gated else 1):
            tensors.append(self.hidden * self.intermediate)
            if self.bias:
                tensors.append(self.intermediate)
        tensors.append(self.intermediate * self.hidden)
        if self.bias:
            tensors.append(self.hidden)
        return tensors


def require_integer(key: str, value: object, least: int, most: int, remedy: str) -> int:
    """Raises ``ModelError``."""
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    raise ModelError(f"{key}: must be an integer from {least} to {most:,}, found {shown(value)}.\n{remedy}")


def head_dim_of(hidden: int, heads: int) -> int:
    """Of heads that share the width. Raises ``ModelError``."""
    if hidden % heads:
        rule = f"hidden: must be a multiple of heads where they share it, found {hidden} for {heads}"
        raise ModelError(f"{rule}.\nCorrect the model's shape, or give its head_dim if it has one of its own.")
    return hidden // heads


def gpt(name: str, layers: int, hidden: int, heads: int, vocab: int, positions: int) -> ModelShape:
    """GPT as in the Megatron-LM paper: feed-forward of four times the width, biases, tied embeddings.

    ``positions``: how many have a learned embedding; 0 for rotary ones.
    """
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim_of(hidden, heads),
        intermediate=4 * hidden,
        vocab=vocab,
        gated=False,
        tied_embeddings=True,
        bias=True,
        norm_params_per_hidden=2,
        learned_positions=positions,
    )
