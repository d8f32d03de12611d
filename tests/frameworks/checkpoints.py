"""Read the checkpoints that DeepSpeed saved in a folder, for any framework."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def contents(folder: Path, pattern: str = "*_states.pt") -> dict[str, Any]:
    """Return every tensor as bytes, and every number of the optimizer, by its file and its keys in that file.

    ``pattern`` selects the files: those of DeepSpeed, or those of ``safetensors``.
    """
    return {
        f"{file.relative_to(folder)}{keys}": leaf
        for file in sorted(folder.rglob(pattern))
        for keys, leaf in _leaves(_load(file), "")
    }


def differences(found: Path, expected: Path, pattern: str = "*_states.pt") -> list[str]:
    """Return the keys of ``contents`` that only one of the folders has, or whose values differ."""
    here, there = contents(found, pattern), contents(expected, pattern)
    return [key for key in sorted({*here, *there}) if key not in here or key not in there or here[key] != there[key]]


def _load(file: Path) -> Any:
    return load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=False)


def _leaves(value: Any, keys: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        yield keys, value.contiguous().view(torch.uint8).numpy().tobytes() if value.dim() else value.item()
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{keys}/{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{keys}/{index}")
    elif isinstance(value, int | float) and "optimizer_state_dict" in keys:
        yield keys, value
