"""Count the parameters of the model of a Hugging Face ``config.json``, which transformers builds without weights.

No code of the model's author is executed, and nothing is downloaded.
"""

from __future__ import annotations

import logging
import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from perf_model.json_input import parse_json, printable, read_text, shorten
from perf_model.training_run.model import MAX_SIZES, ModelError, ModelShape, ParameterShape, mlp_width, require_integer

_REMEDY = "Give the config.json of a Hugging Face model, a preset, or --params with the number of parameters."
_WITHOUT_CONFIG = "Give --params with the number of parameters, in place of --model."

_MODEL_CLASSES = (
    ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "AutoModelForImageTextToText"),
    ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", "AutoModelForSpeechSeq2Seq"),
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "AutoModelForSeq2SeqLM"),
    ("MODEL_FOR_CAUSAL_LM_MAPPING", "AutoModelForCausalLM"),
    ("MODEL_FOR_MASKED_LM_MAPPING", "AutoModelForMaskedLM"),
)
"""The first class with most parameters is used: a text model is a part of a model for images and text."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")


def read_hf_config(path: Path, name: str | None = None) -> ModelShape:
    """Return the shape of the model at ``path``, named as its folder by default. Raise ``ModelError`` if unusable."""
    text = read_text(path, "A model must be a preset or a readable config.json", _REMEDY, ModelError)
    return parse_hf_config(text, name=name or path.parent.name or path.stem)


def parse_hf_config(text: str, name: str) -> ModelShape:
    """Return the shape of the model with the config ``text``. Raise ``ModelError`` if it is not usable."""
    values = parse_json(text, "A model's config must be JSON", _REMEDY, ModelError)
    if not isinstance(values, dict):
        raise ModelError(f"A model's config must be an object, found {shorten(values)}.\n{_REMEDY}")
    family = values.get("model_type")
    if not isinstance(family, str) or not family:
        raise ModelError(f"model_type: must name the family of the model, found {shorten(family)}.\n{_REMEDY}")
    code = ". Its auto_map names code of the model's author, which is not executed" if "auto_map" in values else ""
    try:
        return _shape_of(values, printable(name), code)
    except ModelError:
        raise
    except ImportError as error:
        rule = f"--model: needs torch and transformers for a config.json, found none: {printable(error, most=300)}"
        raise ModelError(f"{rule}.\nInstall both. Or give --params with the number of parameters.") from None
    except Exception as error:  # noqa: BLE001 (any error of a model's class is a reason)
        found = printable(" ".join(f"{type(error).__name__}: {error}".split()), most=300).rstrip(".")
        rule = f"model_type: transformers must be able to build {shorten(family)}, found {found}{code}"
        raise ModelError(f"{rule}.\n{_WITHOUT_CONFIG}") from None


def _shape_of(values: dict[str, Any], name: str, code: str) -> ModelShape:
    """Return the shape of the model that transformers builds. Raise whatever transformers raises.

    Operations are of a text: encoders for images and sound count only as parameters, and of experts the share that a
    token is routed to. Sizes that the config does not name are 0.
    """
    # Models with a backbone would look it up on the hub. transformers reads the variable when it is imported.
    is_set = "HF_HUB_OFFLINE" in os.environ
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import torch
        import transformers
    finally:
        if not is_set:
            del os.environ["HF_HUB_OFFLINE"]

    if (family := values["model_type"]) not in transformers.CONFIG_MAPPING:
        near = ", ".join(get_close_matches(family.lower(), transformers.CONFIG_MAPPING)) or "none"
        rule = f"model_type: must be one that the installed transformers has, found {shorten(family)}{code}"
        raise ModelError(f"{rule}.\nNear ones: {near}. {_WITHOUT_CONFIG}")
    # A warning for a config of which only the sizes are used would be read as an error of the plan.
    transformers.logging.set_verbosity(logging.ERROR)
    config = transformers.CONFIG_MAPPING[family].from_dict(values)
    text = config.get_text_config()

    def size(*keys: str) -> int:
        found = (getattr(text, key, None) for key in keys)
        return next((value for value in found if type(value) is int and value > 0), 0)

    layers, hidden, vocab = size("num_hidden_layers"), size("hidden_size"), size("vocab_size")
    sizes: dict[str, Any] = {"layers": layers, "hidden": hidden, "vocab": vocab}
    for key, found in sizes.items():
        require_integer(f"{key} of {shorten(family)}", found, 1, MAX_SIZES[key], _WITHOUT_CONFIG)
    heads, chosen, experts = size("num_attention_heads"), size(*_EXPERTS_PER_TOKEN), size(*_EXPERTS)
    kv_heads = size("num_key_value_heads") or heads
    if heads % (kv_heads or 1):
        rule = f"num_key_value_heads: must divide the number of heads, {heads}, found {kv_heads}"
        raise ModelError(f"{rule}.\nCorrect the config.json.")
    if 0 < experts < chosen:
        rule = f"experts per token: must be at most the number of experts, {experts}, found {chosen}"
        raise ModelError(f"{rule}.\nCorrect the config.json.")
    names = (name for mapping, name in _MODEL_CLASSES if type(config) in getattr(transformers, mapping))
    with torch.device("meta"):
        model = getattr(transformers, next(names, "AutoModel")).from_config(config, trust_remote_code=False)
    active = (chosen, experts) if chosen and experts else (1, 1)
    tensors, tied = _parameters_of(model, {type(config), type(text)}, active)
    # In latent attention, the values of all heads have a width of their own, and the queries another one.
    value_dim = size("v_head_dim")
    head_dim = value_dim or size("head_dim") or (hidden // heads if heads else 0)
    query_dim = size("qk_nope_head_dim") + size("qk_rope_head_dim") if value_dim else head_dim
    return ModelShape(
        name=name,
        **sizes,
        heads=heads,
        kv_heads=heads if value_dim else kv_heads,
        head_dim=head_dim,
        intermediate=mlp_width(tensors, hidden) or size("intermediate_size"),
        scores_width=layers * heads * (query_dim + head_dim),
        tensors=tuple(tensors),
        tied=tuple(tied),
        source=f"counted by {type(model).__name__} of transformers {transformers.__version__}",
    )


def _parameters_of(
    model: Any, configs: set[type], active: tuple[int, int]
) -> tuple[list[ParameterShape], list[tuple[str, str]]]:
    """Return the parameters of ``model``, and each further name of a tied one with its first name.

    A token passes the modules with a config of the types ``configs``, and the share ``active`` of experts.
    """
    import torch
    import transformers

    not_multiplied = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, transformers.PreTrainedModel) and type(module.config) not in configs
        for parameter in module.parameters()
    }
    not_multiplied |= {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    if (head := model.get_output_embeddings()) is not None:
        # A tied embedding is looked up, and multiplied for the logits.
        not_multiplied -= {id(head.weight)}
    found, first_names, tied = [], dict[int, str](), []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first_names:
            tied.append((name, first_names[id(parameter)]))
            continue
        first_names[id(parameter)] = name
        numel = parameter.numel()
        active_numel = numel * active[0] // active[1] if ".experts." in name else numel
        matrix = parameter.dim() >= 2 and not name.endswith("bias")
        found.append(ParameterShape(name, numel, active_numel, matrix and id(parameter) not in not_multiplied))
    return found, tied
