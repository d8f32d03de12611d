"""Read a ``ModelShape`` from a Hugging Face ``config.json``.

The count of parameters is exact for the families that have a formula here. The model of any other family is built by
transformers, if it is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from perf_model.json_input import parse_json, printable, read_text, reason, shorten
from perf_model.training_run.families import dense, mixture
from perf_model.training_run.families.config_values import HuggingFaceConfig
from perf_model.training_run.meta_model import shape_from_transformers
from perf_model.training_run.model import ModelError, ModelShape

FAMILIES: dict[str, Callable[[HuggingFaceConfig, str], ModelShape]] = {
    "llama": dense.llama,
    "mistral": dense.mistral,
    "qwen2": dense.qwen2,
    "qwen3": dense.qwen3,
    "gemma": dense.gemma,
    "gemma2": dense.gemma2,
    "gemma3_text": dense.gemma3,
    "phi": dense.phi,
    "phi3": dense.phi3,
    "olmo": dense.olmo,
    "olmo2": dense.olmo2,
    "gpt2": dense.gpt2,
    "gpt_neox": dense.gpt_neox,
    "mixtral": mixture.mixtral,
    "qwen2_moe": mixture.qwen2_moe,
    "qwen3_moe": mixture.qwen3_moe,
    "gpt_oss": mixture.gpt_oss,
    "deepseek_v2": mixture.deepseek_v2,
    "deepseek_v3": mixture.deepseek_v3,
}
"""The families that need no transformers, by ``model_type``."""

_REMEDY = "Give the config.json of a Hugging Face model, a preset, or --params with the number of parameters."


def read_hf_config(path: Path) -> ModelShape:
    """Return the shape of the model at ``path``. Raise ``ModelError`` if it is not a config that can be planned for."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        rule = f"A model must be a preset or a readable config.json, found {printable(path)}: {reason(error)}"
        raise ModelError(f"{rule}.\n{_REMEDY}") from None
    return parse_hf_config(text, name=path.parent.name or path.stem)


def parse_hf_config(text: str, name: str) -> ModelShape:
    """Return the shape of the model ``text``, named ``name``. Raise ``ModelError`` as ``read_hf_config``."""
    try:
        config = parse_json(text)
    except ValueError as error:
        raise ModelError(f"A model's config must be JSON, found a text that is not: {error}.\n{_REMEDY}") from None
    if not isinstance(config, dict):
        raise ModelError(f"A model's config must be an object, found {shorten(config)}.\n{_REMEDY}")
    return shape_of(config, printable(name))


def shape_of(config: dict[str, Any], name: str) -> ModelShape:
    """Return the shape of the model with the values ``config``. Raise ``ModelError`` if it cannot be planned for."""
    family = config.get("model_type")
    if not isinstance(family, str) or not family:
        raise ModelError(f"model_type: must name the family of the model, found {shorten(family)}.\n{_REMEDY}")
    if family in FAMILIES:
        shape = FAMILIES[family](HuggingFaceConfig(config), name)
        return replace(shape, source=f"counted by the formula of {family}")
    return shape_from_transformers(config, family, name)
