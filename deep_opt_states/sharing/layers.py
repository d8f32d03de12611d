"""Let layers of a model share their parameters: the pseudo stage of Pseudo-to-Real training.

The strategy is that of M6-10T (arXiv 2110.03888). ``scale="mean"`` is Algorithm 1 of SWE (arXiv 2110.03848).
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterable
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn

Scale = Literal["mean", "sum"]

_POSITION = frozenset(("layer_idx", "layer_id", "layer_number"))
"""Attributes in which layers may differ: models use them to find the layer's part of a KV cache."""

_REFUSED_SETTINGS = {
    "use_cache": "The layers of a KV cache are found by layer_idx, which shared layers have in common.",
    "scale_attn_by_inverse_layer_idx": "Attention is scaled by layer_idx, which shared layers have in common.",
}
"""Settings of Hugging Face configs with which a shared layer does not compute what a layer of its own does."""

_CONFIGS = ("config", "generation_config")
"""The attributes of Hugging Face models that hold such settings."""


class SharingError(ValueError):
    """The error for layers that cannot share parameters. The message has the rule, the value found and the remedy."""


def share_layers(model: nn.Module, path: str, *, every: int = 1, scale: Scale = "mean") -> None:
    """Replace layer ``i`` of ``model`` by layer ``i % every``, for all layers but the first ``every``.

    ``path`` names the ``nn.ModuleList`` or ``nn.Sequential`` of the layers, such as ``"model.layers"``. Call this
    before ``deepspeed.initialize`` and before an optimizer is made. The parameters of the replaced layers leave the
    model.

    Autograd adds up the gradients of all uses of a parameter. ``scale="mean"`` divides this sum by the number of uses,
    by a tensor hook, so that clipping and the moments have the size of those of one layer. ``"sum"`` leaves the sum.
    Parameters that replace those of a layer later, as AutoTP does under ``zero.Init``, get the hook in their first
    forward, unless that is compiled.

    A Hugging Face model can be saved by ``save_pretrained``: all names but the first of each parameter are added to
    ``_tied_weights_keys``. Raise ``SharingError`` if the layers differ in more than the values of their parameters (in
    classes, shapes, buffers, or attributes that are numbers, strings, functions, or sequences of these), or if a
    setting of a config in the model excludes sharing. The model is unchanged then.
    """
    layers = _find_layers(model, path)
    _check_arguments(layers, path, every, scale)
    _check_settings(model)
    for index in range(every, len(layers)):
        _check_same(layers[index % every], layers[index], f"{path}.{index % every}", f"{path}.{index}")
    tied_before = _tied_names(model)
    _warn_about_reentrant_checkpointing(model)

    uses = Counter(index % every for index in range(len(layers)))
    for index in range(every, len(layers)):
        layers[index] = layers[index % every]
    if scale == "mean":
        for index in range(every):
            _divide_gradients_of(layers[index], uses[index])
    if hasattr(model, "_tied_weights_keys"):
        _declare_tied(model, tied_before, path, len(layers), every)


def _find_layers(model: nn.Module, path: str) -> Any:
    """Return the list of layers; raise ``SharingError`` if there is none."""
    try:
        layers = model.get_submodule(path)
    except AttributeError:
        layers = None
    if isinstance(layers, nn.ModuleList | nn.Sequential):
        return layers
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    found = "no module of this name" if layers is None else f"a {type(layers).__name__}"
    raise SharingError(
        f"path: must name an nn.ModuleList or nn.Sequential of layers, found {path!r}, which is {found}.\n"
        f"The model has {', '.join(lists) or 'none'}."
    )


def _check_arguments(layers: Any, path: str, every: int, scale: str) -> None:
    if scale not in ("mean", "sum"):
        raise SharingError(f'scale: must be "mean" or "sum", found {scale!r}.\nThe default is "mean".')
    if not 1 <= every < len(layers):
        raise SharingError(
            f"every: must be at least 1 and less than the number of layers, {len(layers)}, found {every}.\n"
            f"With every=1 all layers share the parameters of the first one."
        )
    if len({id(layer) for layer in layers}) < len(layers):
        raise SharingError(
            f"path: must name layers that do not share parameters yet, found one layer several times in {path!r}.\n"
            f"Call share_layers once, with the largest number of layers per parameter."
        )


def _check_settings(model: nn.Module) -> None:
    """Raise ``SharingError`` if a config excludes sharing: that of the model, or of a part, such as its text model.

    ``generate`` reads ``use_cache`` from a config of its own, which is made together with the model.
    """
    places = ((path, module, kind) for path, module in model.named_modules() for kind in _CONFIGS)
    for path, module, kind in places:
        config = getattr(module, kind, None)
        for name, reason in _REFUSED_SETTINGS.items():
            if getattr(config, name, False):
                setting = f"{path + '.' if path else ''}{kind}.{name}"
                raise SharingError(
                    f"{setting}: must be False with shared layers, found True. {reason}\nSet model.{setting} = False."
                )


def _check_same(first: nn.Module, other: nn.Module, first_path: str, other_path: str) -> None:
    """Raise ``SharingError`` unless the two layers differ in the values of their parameters only."""
    expected, found = dict(_structure(first)), dict(_structure(other))
    for name in expected.keys() | found.keys():
        if expected.get(name) != found.get(name):
            raise SharingError(
                f"Layers that share parameters must have the same classes, shapes and attributes; found {name} = "
                f"{expected.get(name)} in {first_path} and {found.get(name)} in {other_path}.\n"
                f"Choose `every` so that only equal layers share, or build the model with equal layers."
            )


def _structure(layer: nn.Module) -> Iterable[tuple[str, object]]:
    """Yield all that has to be equal in layers that share their parameters, by name."""
    for path, module in layer.named_modules():
        prefix = f"{path}." if path else ""
        yield f"{prefix}class", type(module)
        for name, value in vars(module).items():
            # Modules keep "sliding_window", "attention_type", activation functions and the like as attributes.
            if not name.startswith("_") and name not in _POSITION and (compared := _compared(value)) is not None:
                yield f"{prefix}{name}", compared
    for name, param in layer.named_parameters(remove_duplicate=False):
        # A parameter that zero.Init has partitioned has an empty shape of its own.
        shape = tuple(getattr(param, "ds_shape", param.shape))
        yield f"{name} (shape, dtype, requires_grad)", (shape, param.dtype, param.requires_grad)
    for name, buffer in layer.named_buffers(remove_duplicate=False):
        yield f"{name} (shape, dtype, digest of the values)", (tuple(buffer.shape), buffer.dtype, _digest(buffer))


def _compared(value: object) -> object:
    """Return what must be equal in two attributes, or None if such values are not compared: tensors and other objects.

    Functions are compared by their names: each layer may have made its own.
    """
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, FunctionType | BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, tuple | list):
        return [_compared(item) for item in value]
    return None


def _digest(buffer: Tensor) -> str:
    """Return a digest of the values, or an empty text on the meta device, where there are none."""
    if buffer.is_meta:
        return ""
    values = buffer.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]


def _warn_about_reentrant_checkpointing(model: nn.Module) -> None:
    """Warn where a Hugging Face model is set to reentrant checkpointing.

    It is no error: the plugin adds up the gradients that then arrive once per use. This function does not know whether
    the plugin or stock DeepSpeed will train the model.
    """
    for module in model.modules():
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if getattr(checkpoint, "keywords", {}).get("use_reentrant"):
            warnings.warn(
                "Shared layers under reentrant activation checkpointing: stock DeepSpeed loses gradients or fails, "
                'because they arrive several times; with "deep_optimizer_states" they are added up. Use '
                'gradient_checkpointing_kwargs={"use_reentrant": False} to be right with both.',
                stacklevel=3,
            )
            return


def _divide_gradients_of(layer: nn.Module, uses: int) -> None:
    """Divide the gradients of the layer's trainable parameters by ``uses``, also of those that it will have later."""
    if uses > 1:
        _add_missing_hooks(layer, uses)
        layer.register_forward_pre_hook(partial(_before_forward, uses))


def _before_forward(uses: int, layer: nn.Module, args: object) -> None:
    """Add the hooks of parameters that were replaced, copied or made trainable after ``share_layers``."""
    if not torch.compiler.is_compiling():
        _add_missing_hooks(layer, uses)


def _add_missing_hooks(layer: nn.Module, uses: int) -> None:
    def divided(gradient: Tensor) -> Tensor:
        return torch.div(gradient, uses)

    params: Iterable[Any] = layer.parameters()
    for param in params:
        # A copy of a parameter has neither its hooks nor its attributes.
        if param.requires_grad and not hasattr(param, "shared_uses"):
            param.register_hook(divided)
            param.shared_uses = uses


def _tied_names(model: Any) -> dict[str, str]:
    """Return the tied names of a Hugging Face model, and the name that each of them is tied to.

    Raise ``SharingError`` if they are a list, as before transformers 5.
    """
    tied = getattr(model, "_tied_weights_keys", None) or {}
    if isinstance(tied, dict):
        return tied
    raise SharingError(
        f"_tied_weights_keys: must be a dict, as in transformers 5, found a {type(tied).__name__} in "
        f"{type(model).__name__}.\nUpdate transformers and the model's code."
    )


def _declare_tied(model: Any, tied_before: dict[str, str], path: str, num_layers: int, every: int) -> None:
    """Add the further names of shared tensors to the names that ``save_pretrained`` of Hugging Face leaves out."""
    tied = {
        f"{path}.{index}.{name}": f"{path}.{index % every}.{name}"
        for index in range(every, num_layers)
        for name in model.get_submodule(f"{path}.{index}").state_dict()
    }
    # A dict of the class would be shared with other models, so the instance gets one of its own.
    model._tied_weights_keys = {**tied_before, **tied}
    model.all_tied_weights_keys = {**getattr(model, "all_tied_weights_keys", {}), **tied}
