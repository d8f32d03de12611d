"""Build the model of a Hugging Face config without memory for its weights, and print its parameters as JSON.

``perf_model`` runs this program for a family that it has no formula for: it never imports torch itself. The config is
read from stdin. No code of the model's author is executed, and nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from typing import Any

MAX_DATA_BYTES = 2**34
"""Memory that the program may take. Importing torch takes 1 GB, and modules without weights take little."""

_MODEL_CLASSES = (
    ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "AutoModelForImageTextToText"),
    ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", "AutoModelForSpeechSeq2Seq"),
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "AutoModelForSeq2SeqLM"),
    ("MODEL_FOR_CAUSAL_LM_MAPPING", "AutoModelForCausalLM"),
    ("MODEL_FOR_MASKED_LM_MAPPING", "AutoModelForMaskedLM"),
)
"""The classes that are tried, the first with most parameters: a text model is a part of a model for images and text."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")


def main() -> None:
    """Read the config from stdin, and print one line of JSON: ``describe``, or ``{"error": reason}``."""
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    # transformers prints warnings, and stdout is for the result.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            result = describe(json.load(sys.stdin))
        except ImportError as error:
            result = {"error": f"{error.name or error} cannot be imported"}
        except Exception as error:  # noqa: BLE001 (any error of a model's class is a reason)
            result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(result))


def describe(values: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters and the sizes of the model with the config ``values``.

    ``parameters`` has a list for each: name, number of elements, elements that a token uses, and whether it is a matrix
    that each token is multiplied by. Sizes that the config does not name are 0. Raise whatever transformers raises.
    """
    import torch
    import transformers

    config = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(values)
    with torch.device("meta"):
        model = _model_class(config).from_config(config, trust_remote_code=False)
    text = config.get_text_config()
    share = _active_share(text)
    excluded = _other_modalities(model, text)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is not None:
        # A tied embedding is looked up, and multiplied for the logits.
        tables -= {id(head.weight)}
    rows, first_names, tied = [], dict[int, str](), []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first_names:
            tied.append([name, first_names[id(parameter)]])
            continue
        first_names[id(parameter)] = name
        numel = parameter.numel()
        active = numel * share[0] // share[1] if ".experts." in name else numel
        # The biases of experts form a matrix, too.
        matrix = parameter.dim() >= 2 and not name.endswith("bias")
        multiplied = matrix and id(parameter) not in tables | excluded
        rows.append([name, numel, active, multiplied])
    layers, heads = _size(text, "num_hidden_layers"), _size(text, "num_attention_heads")
    hidden = _size(text, "hidden_size")
    return {
        "source": f"{type(model).__name__} of transformers {transformers.__version__}",
        "parameters": rows,
        "tied": tied,
        "layers": layers,
        "hidden": hidden,
        "vocab": _size(text, "vocab_size"),
        "heads": heads,
        "kv_heads": _size(text, "num_key_value_heads") or heads,
        "head_dim": _size(text, "head_dim") or (hidden // heads if heads else 0),
        "intermediate": _size(text, "intermediate_size"),
    }


def _model_class(config: Any) -> Any:
    import transformers

    for mapping, name in _MODEL_CLASSES:
        if type(config) in getattr(transformers, mapping):
            return getattr(transformers, name)
    return transformers.AutoModel


def _active_share(text: Any) -> tuple[int, int]:
    """Return how many experts a token is routed to, and how many there are; the same numbers if it is not known."""
    count = next((size for key in _EXPERTS if (size := _size(text, key))), 0)
    chosen = next((size for key in _EXPERTS_PER_TOKEN if (size := _size(text, key))), 0)
    return (chosen, count) if 0 < chosen <= count else (1, 1)


def _other_modalities(model: Any, text: Any) -> set[int]:
    """Return the identities of the parameters of encoders for images and sound, which no token of a text passes."""
    import transformers

    kinds = {type(model.config), type(text)}
    return {
        id(parameter)
        for module in model.modules()
        if isinstance(module, transformers.PreTrainedModel) and type(module.config) not in kinds
        for parameter in module.parameters()
    }


def _size(config: Any, key: str) -> int:
    value = getattr(config, key, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


if __name__ == "__main__":
    main()
