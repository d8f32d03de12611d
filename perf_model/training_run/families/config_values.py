"""Read the values of a Hugging Face config, with the errors that name the key."""

from __future__ import annotations

from typing import Any

from perf_model.json_input import shorten
from perf_model.training_run.families.decoder import DecoderWidths
from perf_model.training_run.model import MAX_SIZES, ModelError, divide_among_heads, require_integer

_REMEDY = "Correct the config.json, or plan without it: --params with the number of parameters."


class HuggingFaceConfig:
    """The values of a config. Hugging Face has one default for a missing key, and another one for a null value."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def integer(
        self, key: str, field: str, *, missing: int | None = None, null: int | None = None, least: int = 1
    ) -> int:
        """Return the value of ``key``, which is bounded as ``field`` in ``MAX_SIZES``."""
        value = self._values.get(key, missing)
        return require_integer(key, null if value is None else value, least, MAX_SIZES[field], _REMEDY)

    def flag(self, key: str, default: bool) -> bool:
        """Return the value of ``key``, or ``default`` if it is missing or null."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"{key}: must be true or false, found {shorten(value)}.\n{_REMEDY}")
        return value

    def layer_numbers(self, key: str) -> frozenset[int]:
        """Return the value of ``key``, a list of numbers of layers; missing or null means none."""
        value = self._values.get(key)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(type(number) is int for number in value):
            raise ModelError(f"{key}: must be a list of numbers of layers, found {shorten(value)}.\n{_REMEDY}")
        return frozenset(value)

    def has(self, key: str) -> bool:
        """Return whether the config has a value for ``key`` that is not null."""
        return self._values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Return whether the config has ``key``, with the value null."""
        return key in self._values and self._values[key] is None

    def widths(self, *, kv_heads: int | None = None, head_dim: int | None = None) -> DecoderWidths:
        """Return the widths of a decoder whose keys are those of Llama.

        ``kv_heads`` and ``head_dim`` are used if the config lacks these keys; by default they follow from the heads.
        """
        hidden, heads = self.integer("hidden_size", "hidden"), self.integer("num_attention_heads", "heads")
        if head_dim is None and not self.has("head_dim"):
            head_dim = divide_among_heads(hidden, heads)
        return DecoderWidths(
            layers=self.integer("num_hidden_layers", "layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=self.integer("num_key_value_heads", "kv_heads", missing=kv_heads, null=heads),
            head_dim=self.integer("head_dim", "head_dim", null=head_dim),
            intermediate=self.integer("intermediate_size", "intermediate"),
            vocab=self.integer("vocab_size", "vocab"),
        )
