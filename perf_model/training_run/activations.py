"""Compute the memory of the activations of Hugging Face's Llama in bf16, at the moments of backward with the most."""

from __future__ import annotations

from dataclasses import dataclass

from perf_model.training_run.model import ModelShape

SCORE_BYTES: dict[str, tuple[int, int]] = {"flash": (0, 0), "fused_softmax": (2, 4), "eager": (6, 12)}
"""Bytes per attention score that a layer keeps for backward, and that exist while backward computes its gradient.

``eager`` is the attention of Transformers without a fused kernel, whose softmax is in fp32, and ``fused_softmax`` that
of Megatron-LM without flash attention.
"""

LOGIT_BYTES = 14
"""Bytes per logit in the backward of the loss (``transformers/loss/loss_utils.py``): the logarithm of the softmax, its
gradient and that of the logits in fp32, and the logits in bf16, while the caller has the outputs of the model."""

LOGIT_GRADIENT_BYTES = 4
"""Bytes per logit when the gradient of the head's weight exists: the logits and their gradient in bf16."""


@dataclass(frozen=True, kw_only=True)
class Activations:
    """The activations of ``shape`` for ``tokens`` tokens of one rank, in sequences of ``sequence`` tokens.

    ``attention`` is a key of ``SCORE_BYTES``. With ``recompute``, backward has all activations of one layer, and only
    the inputs of the layers that it has not reached; otherwise it has all activations of those. ``tensor_parallel``
    ranks divide the heads and the width of the feed-forward (arXiv 2205.05198, section 4.2.1), and each has all logits,
    which AutoTP gathers.
    """

    shape: ModelShape
    tokens: int
    sequence: int
    recompute: bool
    attention: str
    tensor_parallel: int = 1

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes that exist in backward: of the loss, or of a part of the last layer."""
        last = self.shape.layers - 1
        return max(self.in_loss, self.in_feed_forward(last), self.in_attention(last))

    @property
    def layer_bytes(self) -> int:
        """Return the bytes that one layer keeps for backward."""
        saved, _ = SCORE_BYTES[self.attention]
        return self._attention_bytes(saved) + self._feed_forward_bytes

    @property
    def kept_bytes(self) -> int:
        """Return the bytes that all layers keep for backward."""
        return self._kept(self.shape.layers)

    @property
    def logits_bytes(self) -> int:
        """Return the bytes of the logits in the backward of the loss."""
        return LOGIT_BYTES * self.tokens * self.shape.vocab

    @property
    def in_loss(self) -> int:
        """Return the bytes in the backward of the loss."""
        return self.kept_bytes + self.logits_bytes + self.tokens * (self._norm_bytes + 2) * self.shape.hidden

    @property
    def in_head(self) -> int:
        """Return the bytes when the gradient of the head's weight exists."""
        return self.kept_bytes + LOGIT_GRADIENT_BYTES * self.tokens * self.shape.vocab

    def in_feed_forward(self, layer: int) -> int:
        """Return the most bytes in the backward of a layer's feed-forward: with the gradients of all products."""
        return self._kept_before(layer) + self.layer_bytes + self._product_gradients_bytes(self._products)

    def after_last_product(self, layer: int) -> int:
        """Return the bytes when backward has the gradient of the weight of a layer's last product."""
        return self._kept_before(layer) + self.layer_bytes + self._product_gradients_bytes(1)

    def after_first_products(self, layer: int) -> int:
        """Return the bytes when backward has the gradients of the weights of gate and up: products are freed."""
        kept_bytes = self.layer_bytes - self.tokens * self._product_bytes
        return self._kept_before(layer) + kept_bytes + self._product_gradients_bytes(self._products)

    def in_attention(self, layer: int) -> int:
        """Return the bytes in the backward of a layer's attention, when its feed-forward has freed its activations."""
        _, peak = SCORE_BYTES[self.attention]
        return self._kept_before(layer) + self._attention_bytes(peak) + 4 * self.tokens * self.shape.hidden

    def _kept_before(self, layer: int) -> int:
        """Return the bytes of the layers before ``layer``, and of its own input if it was computed again."""
        return self._kept(layer + 1 if self.recompute else layer)

    def _kept(self, layers: int) -> int:
        return layers * (2 * self.tokens * self.shape.hidden if self.recompute else self.layer_bytes)

    @property
    def _norm_bytes(self) -> int:
        """Return the bytes per token and hidden unit that a norm keeps.

        LayerNorm, which has a weight and a bias, keeps its input and its output. RMSNorm has its input in fp32, and its
        output before and after the multiplication by the weight.
        """
        return 4 if self.shape.has_layer_norm else 8

    def _attention_bytes(self, score_bytes: int) -> int:
        """Return the bytes of norm, query, key, value and output, with ``score_bytes`` per score.

        Without a flash kernel, keys and values are repeated for each head of the query.
        """
        shape = self.shape
        key_value_heads = shape.kv_heads if self.attention == "flash" else shape.heads
        # The widths of a model that was only counted are unknown: they are assumed to be those of a GPT.
        projections = 4 * shape.head_dim * (shape.heads + key_value_heads) or 8 * shape.hidden
        scores = score_bytes * shape.heads * self.sequence
        return self.tokens * (self._norm_bytes * shape.hidden + (projections + scores) // self.tensor_parallel)

    @property
    def _feed_forward_bytes(self) -> int:
        return self.tokens * (self._norm_bytes * self.shape.hidden + self._product_bytes)

    @property
    def _products(self) -> int:
        return 2 if self.shape.gated else 1

    @property
    def _product_bytes(self) -> int:
        """Return the bytes per token of gate, up, activated gate and their product, or of up and activated up."""
        return 4 * self._products * self._intermediate

    def _product_gradients_bytes(self, products: int) -> int:
        """Return the bytes of the gradients of so many products, and of input and output of the layer."""
        return 2 * self.tokens * (products * self._intermediate + 2 * self.shape.hidden)

    @property
    def _intermediate(self) -> int:
        return -(-(self.shape.intermediate or 4 * self.shape.hidden) // self.tensor_parallel)
