"""Compare every tensor that two runs have saved, and print the number of tensors and the differences as JSON.

same_bits.py STOCK OURS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

SUFFIXES = {".safetensors", ".pt", ".bin", ".pth"}
NOT_OF_TRAINING = {"training_args.bin"}


def saved(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES):
        if path.name in NOT_OF_TRAINING:
            continue
        content = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=False)
        name = str(path.relative_to(folder))
        tensors |= {f"{name}{place}": tensor for place, tensor in _tensors(content, "")}
    return tensors


def _tensors(value: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(inner, f"{place}[{key}]")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _tensors(inner, f"{place}[{index}]")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, so that 0.0 differs from -0.0, and equal NaNs do not differ."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def differences(stock: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> list[str]:
    lines = [f"{name} was saved by one of the two only" for name in sorted(stock.keys() ^ ours.keys())]
    for name in sorted(stock.keys() & ours.keys()):
        one, other = stock[name], ours[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape) or not torch.equal(bits(one), bits(other)):
            lines.append(f"{name} differs")
    return lines


if __name__ == "__main__":
    stock, ours = (saved(Path(folder)) for folder in sys.argv[1:3])
    print(json.dumps({"tensors": len(stock), "differences": differences(stock, ours)}))
