"""Read a ``ModelShape`` from a Hugging Face ``config.json``. The count of parameters is exact for these families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from perf_model.json_input import parse_json, read_text, shorten
from perf_model.training_run.model import MAX_SIZES, ModelError, ModelShape, divide_among_heads, gpt, require_integer


def read_hf_config(path: Path) -> ModelShape:
    """Return the shape of the model at ``path``. Raise ``ModelError`` if it is not the config of a known family."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"A model must be a preset or a readable config.json, found {path}: {error}.\n{_FAMILIES}"
        ) from None
    return parse_hf_config(text, name=path.parent.name or path.stem)


def parse_hf_config(text: str, name: str) -> ModelShape:
    """Return the shape of the model ``text``, named ``name``. Raise ``ModelError`` as ``read_hf_config``."""
    try:
        config = parse_json(text)
    except ValueError as error:
        raise ModelError(
            f"A model's config must be JSON, found a text that is not JSON: {error}.\n{_FAMILIES}"
        ) from None
    if not isinstance(config, dict):
        raise ModelError(f"A model's config must be an object, found {shorten(config)}.\n{_FAMILIES}")
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _READERS:
        raise ModelError(f"model_type: must be one of {', '.join(_READERS)}, found {shorten(family)}.\n{_FAMILIES}")
    return _READERS[family](_HuggingFaceConfig(config), name)


class _HuggingFaceConfig:
    """The values of a config. Hugging Face has one default for a missing key, and another one for a null value."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def integer(self, key: str, field: str, *, missing: int | None = None, null: int | None = None) -> int:
        """Return the value of ``key``, which becomes ``field`` of the ``ModelShape``."""
        value = self._values.get(key, missing)
        return require_integer(key, null if value is None else value, 1, MAX_SIZES[field], "Correct the config.json.")

    def flag(self, key: str, default: bool) -> bool:
        """Return the value of ``key``, or ``default`` if it is missing or null."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"{key}: must be true or false, found {shorten(value)}.\nCorrect the config.json.")
        return value

    def require_flag(self, key: str, counted: bool) -> None:
        """Raise ``ModelError`` unless the biases are those that are counted here, which are Hugging Face's default."""
        if self.flag(key, default=counted) is not counted:
            rule = f"{key}: must be {str(counted).lower()}, found {str(not counted).lower()}"
            raise ModelError(
                f"{rule}.\nOther biases are not counted. Set the required value for a plan of almost this model."
            )

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None


def _llama_like(
    config: _HuggingFaceConfig,
    name: str,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    qk_norm: bool = False,
) -> ModelShape:
    """Return the shape of a model like Llama.

    ``kv_heads`` and ``head_dim`` are used if the config lacks these keys; by default they follow from the heads.
    """
    hidden, heads = config.integer("hidden_size", "hidden"), config.integer("num_attention_heads", "heads")
    if head_dim is None and not config.has("head_dim"):
        head_dim = divide_among_heads(hidden, heads)
    return ModelShape(
        name=name,
        layers=config.integer("num_hidden_layers", "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", "kv_heads", missing=kv_heads, null=heads),
        head_dim=config.integer("head_dim", "head_dim", null=head_dim),
        intermediate=config.integer("intermediate_size", "intermediate"),
        vocab=config.integer("vocab_size", "vocab"),
        tied_embeddings=config.flag("tie_word_embeddings", default=False),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
    )


def _llama(config: _HuggingFaceConfig, name: str) -> ModelShape:
    config.require_flag("attention_bias", counted=False)
    config.require_flag("mlp_bias", counted=False)
    return _llama_like(config, name)


def _qwen3(config: _HuggingFaceConfig, name: str) -> ModelShape:
    config.require_flag("attention_bias", counted=False)
    return _llama_like(config, name, kv_heads=32, head_dim=128, qk_norm=True)


def _gpt2(config: _HuggingFaceConfig, name: str) -> ModelShape:
    hidden = config.integer("n_embd", "hidden")
    shape = gpt(
        name,
        layers=config.integer("n_layer", "layers"),
        hidden=hidden,
        heads=config.integer("n_head", "heads"),
        vocab=config.integer("vocab_size", "vocab"),
        positions=config.integer("n_positions", "learned_positions"),
    )
    return replace(
        shape,
        intermediate=config.integer("n_inner", "intermediate", null=4 * hidden),
        tied_embeddings=config.flag("tie_word_embeddings", default=True),
    )


def _gpt_neox(config: _HuggingFaceConfig, name: str) -> ModelShape:
    config.require_flag("attention_bias", counted=True)
    shape = gpt(
        name,
        layers=config.integer("num_hidden_layers", "layers"),
        hidden=config.integer("hidden_size", "hidden"),
        heads=config.integer("num_attention_heads", "heads"),
        vocab=config.integer("vocab_size", "vocab"),
        positions=0,
    )
    return replace(
        shape,
        intermediate=config.integer("intermediate_size", "intermediate"),
        tied_embeddings=config.flag("tie_word_embeddings", default=False),
    )


_READERS: dict[str, Callable[[_HuggingFaceConfig, str], ModelShape]] = {
    "llama": _llama,
    "mistral": lambda config, name: _llama_like(config, name, kv_heads=8),
    "qwen2": lambda config, name: _llama_like(config, name, kv_heads=32, qkv_bias=True),
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}

_FAMILIES = f"Supported families: {', '.join(_READERS)}. For another family, use a preset of a similar size."
