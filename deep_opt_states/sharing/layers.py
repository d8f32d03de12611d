"""Let layers share their parameters: the pseudo stage of Pseudo-to-Real training, as in M6-10T (arXiv 2110.03888)."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, Literal

import torch
from torch import nn

Scale = Literal["mean", "sum"]

_POSITION = frozenset(("layer_idx", "layer_id", "layer_number"))
"""Attributes in which layers may differ: models use them to find the layer's part of a KV cache."""

_REFUSED_SETTINGS = {
    "use_cache": "The layers of a KV cache are found by layer_idx, which shared layers have in common.",
    "scale_attn_by_inverse_layer_idx": "Attention is scaled by layer_idx, which shared layers have in common.",
}
"""Settings of Hugging Face configs with which a shared layer computes something else."""


class SharingError(ValueError):
    """The error for layers that cannot share parameters."""


def share_layers(model: nn.Module, path: str, *, every: int = 1, scale: Scale = "mean") -> None:
    """Replace layer ``i`` of ``model`` by layer ``i % every``, for all layers but the first ``every``.

    ``path`` names an ``nn.ModuleList`` or ``nn.Sequential``, such as ``"model.layers"``. Call this before
    ``deepspeed.initialize``, and before an optimizer is made. ``save_pretrained`` of Hugging Face still works.

    Autograd adds up the gradients of all uses of a parameter. ``scale="mean"`` divides this sum by the number of uses,
    so that clipping and moments have the size of one layer's (Algorithm 1 of arXiv 2110.03848). Parameters that replace
    others later, as AutoTP does under ``zero.Init``, get this hook in their first forward, unless that is compiled.

    Raise ``SharingError``, with the model unchanged, if layers differ in more than values, or if a config excludes it.
    """
    layers = _find_layers(model, path)
    _check_arguments(layers, path, every, scale)
    _check_settings(model)
    for index in range(every, len(layers)):
        _check_same(layers, path, index % every, index)
    for index in range(every, len(layers)):
        layers[index] = layers[index % every]
    for index in range(every if scale == "mean" else 0):
        uses = len(range(index, len(layers), every))
        if uses > 1:
            _divide_gradients(uses, layers[index])
            layers[index].register_forward_pre_hook(partial(_divide_gradients, uses))
    if hasattr(model, "_tied_weights_keys"):
        _declare_tied(model, path, len(layers), every)


def _find_layers(model: nn.Module, path: str) -> Any:
    modules = dict(model.named_modules(remove_duplicate=False))
    lists = {name: module for name, module in modules.items() if isinstance(module, nn.ModuleList | nn.Sequential)}
    if path not in lists:
        found = f"a {type(modules[path]).__name__}" if path in modules else "no module of this name"
        raise SharingError(
            f"path: must name an nn.ModuleList or nn.Sequential of layers, found {path!r}, which is {found}.\n"
            f"The model has {', '.join(lists) or 'none'}."
        )
    return lists[path]


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
    """Raise ``SharingError`` if a config of the model, of a part of it or of ``generate`` excludes sharing."""
    if isinstance(getattr(model, "_tied_weights_keys", None), list):
        raise SharingError(
            f"_tied_weights_keys: must be a dict, as in transformers 5, found a list in {type(model).__name__}.\n"
            f"Update transformers and the model's code."
        )
    for path, module in model.named_modules():
        for kind, (name, reason) in itertools.product(("config", "generation_config"), _REFUSED_SETTINGS.items()):
            if getattr(getattr(module, kind, None), name, False):
                setting = f"{path + '.' if path else ''}{kind}.{name}"
                raise SharingError(
                    f"{setting}: must be False with shared layers, found True. {reason}\nSet model.{setting} = False."
                )


def _check_same(layers: Any, path: str, first: int, other: int) -> None:
    """Raise ``SharingError`` unless the two layers differ in the values of their parameters only."""
    expected, found = dict(_structure(layers[first])), dict(_structure(layers[other]))
    for name in expected.keys() | found.keys():
        if expected.get(name) != found.get(name):
            raise SharingError(
                f"Layers that share parameters must have the same classes, shapes and attributes; found {name} = "
                f"{expected.get(name)} in {path}.{first} and {found.get(name)} in {path}.{other}.\n"
                f"Choose `every` so that only equal layers share, or build the model with equal layers."
            )


def _structure(layer: nn.Module) -> Iterable[tuple[str, object]]:
    for path, module in layer.named_modules():
        prefix = f"{path}." if path else ""
        yield f"{prefix}class", type(module)
        for name, value in vars(module).items():
            # Such as "sliding_window", "attention_type" and activation functions.
            if not name.startswith("_") and name not in _POSITION and (compared := _compared(value)) is not None:
                yield f"{prefix}{name}", compared
    for name, param in layer.named_parameters(remove_duplicate=False):
        # zero.Init leaves a partitioned parameter with an empty shape.
        shape = tuple(getattr(param, "ds_shape", param.shape))
        yield f"{name} (shape, dtype, requires_grad)", (shape, param.dtype, param.requires_grad)
    for name, buffer in layer.named_buffers(remove_duplicate=False):
        values = torch.empty(0) if buffer.is_meta else buffer.detach().cpu().contiguous()
        digest = hashlib.sha256(values.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        yield f"{name} (shape, dtype, digest of the values)", (tuple(buffer.shape), buffer.dtype, digest)


def _compared(value: object) -> object:
    """Return a value by which attributes are compared: a name for functions, and None for tensors and other objects."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, FunctionType | BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, tuple | list):
        return [_compared(item) for item in value]
    return None


def _divide_gradients(uses: int, layer: nn.Module, args: object = ()) -> None:
    """Divide the gradient of each trainable parameter by ``uses``, also of parameters that were replaced later."""
    if torch.compiler.is_compiling():
        return
    params: Iterable[Any] = layer.parameters()
    for param in params:
        # A copy of a parameter has neither its hooks nor its attributes.
        if param.requires_grad and not hasattr(param, "shared_uses"):
            param.register_hook(partial(torch.div, other=uses))
            param.shared_uses = uses


def _declare_tied(model: Any, path: str, num_layers: int, every: int) -> None:
    """Add the further names of shared tensors to the names that Hugging Face's ``save_pretrained`` leaves out."""
    tied = {
        f"{path}.{index}.{name}": f"{path}.{index % every}.{name}"
        for index in range(every, num_layers)
        for name in model.get_submodule(f"{path}.{index}").state_dict()
    }
    # A dict of the class is shared with other models.
    model._tied_weights_keys = {**(model._tied_weights_keys or {}), **tied}
    model.all_tied_weights_keys = {**getattr(model, "all_tied_weights_keys", {}), **tied}
