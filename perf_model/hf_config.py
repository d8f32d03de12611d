"""A ``ModelShape`` from a Hugging Face ``config.json``, of families whose parameters are counted to the last one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from perf_model.model import ModelError, ModelShape, gpt


def read_hf_config(path: Path) -> ModelShape:
    """Raises ``ModelError`` for what is not the config of such a model."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"A model must be a preset or a readable config.json, found {path}: {error}.\n{_FAMILIES}"
        ) from None
    return parse_hf_config(text, name=path.parent.name or path.stem)


def parse_hf_config(text: str, name: str) -> ModelShape:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ModelError(f"A model's config is JSON, found a text that is not: {error}.\n{_FAMILIES}") from None
    if not isinstance(config, dict):
        raise ModelError(f"A model's config must be an object, found {config!r}.\n{_FAMILIES}")
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _READERS:
        raise ModelError(f"model_type: must be one of {', '.join(_READERS)}, found {family!r}.\n{_FAMILIES}")
    return _READERS[family](_Config(config), name)


class _Config:
    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{key}: must be an integer of at least 1, found {value!r}.\nCorrect the config.json.")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{key}: must be true or false, found {value!r}.\nCorrect the config.json.")
        return value


def _llama_like(config: _Config, name: str, *, qkv_bias: bool = False, qk_norm: bool = False) -> ModelShape:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    return ModelShape(
        name=name,
        layers=config.integer("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", default=heads),
        head_dim=config.integer("head_dim", default=hidden // heads),
        intermediate=config.integer("intermediate_size"),
        vocab=config.integer("vocab_size"),
        tied_embeddings=config.flag("tie_word_embeddings", default=False),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
    )


def _llama(config: _Config, name: str) -> ModelShape:
    for key in ("attention_bias", "mlp_bias"):
        if config.flag(key, default=False):
            raise ModelError(f"{key}: must be false, found true.\nBiases of Llama models are not counted here.")
    return _llama_like(config, name)


def _gpt2(config: _Config, name: str) -> ModelShape:
    hidden = config.integer("n_embd")
    shape = gpt(
        name,
        layers=config.integer("n_layer"),
        hidden=hidden,
        heads=config.integer("n_head"),
        vocab=config.integer("vocab_size"),
        positions=config.integer("n_positions"),
    )
    return replace(
        shape,
        intermediate=config.integer("n_inner", default=4 * hidden),
        tied_embeddings=config.flag("tie_word_embeddings", default=True),
    )


def _gpt_neox(config: _Config, name: str) -> ModelShape:
    shape = gpt(
        name,
        layers=config.integer("num_hidden_layers"),
        hidden=config.integer("hidden_size"),
        heads=config.integer("num_attention_heads"),
        vocab=config.integer("vocab_size"),
        positions=0,
    )
    return replace(
        shape,
        intermediate=config.integer("intermediate_size"),
        tied_embeddings=config.flag("tie_word_embeddings", default=False),
    )


_READERS: dict[str, Callable[[_Config, str], ModelShape]] = {
    "llama": _llama,
    "mistral": _llama_like,
    "qwen2": lambda config, name: _llama_like(config, name, qkv_bias=True),
    "qwen3": lambda config, name: _llama_like(config, name, qk_norm=True),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}

_FAMILIES = f"Families that are read: {', '.join(_READERS)}. For another, use a preset of about its size."
