"""Read the model that a command plans for: a preset, a ``config.json``, or a number of parameters."""

from __future__ import annotations

import argparse
import os
import re
from difflib import get_close_matches
from pathlib import Path

from perf_model.presets.models import MODELS
from perf_model.training_run.decoder import generic_model
from perf_model.training_run.hf_config import read_hf_config
from perf_model.training_run.model import ModelError, ModelShape


def read_model(options: argparse.Namespace) -> ModelShape:
    """Return the shape of the model in the options. Raise ``ModelError``."""
    for name, needed in (("layers", "params"), ("hidden", "params"), ("every", "share_layers")):
        if (value := getattr(options, name)) is not None and getattr(options, needed) is None:
            rule = f"--{name}: must come with --{needed.replace('_', '-')}, found {value} alone"
            raise ModelError(f"{rule}.\nGive both, or neither.")
    if options.params is not None:
        shape = generic_model(options.params, options.layers, options.hidden)
    else:
        shape = MODELS[options.model] if options.model in MODELS else _from_config(options.model)
    if options.share_layers is None:
        return shape
    return shape.share_layers(options.share_layers, 1 if options.every is None else options.every)


def _from_config(name: str) -> ModelShape:
    """Return the model of a ``config.json``, of a folder with one, or of a name in the cache of Hugging Face."""
    path = os.path.join(name, "config.json") if os.path.isdir(name) else name
    is_on_hub = re.fullmatch(r"([\w.-]+/)?[\w.-]+", name, re.ASCII) is not None
    # Path.exists would raise for a text that no path can be.
    if not os.path.exists(path) and is_on_hub and (cached := _cached_config(name)) is not None:
        return read_hf_config(cached, name.rpartition("/")[2])
    try:
        return read_hf_config(Path(path))
    except ModelError as error:
        if os.path.exists(path):
            raise
        by_name = {preset.lower(): preset for preset in MODELS}
        near = [by_name[match] for match in get_close_matches(name.rpartition("/")[2].lower(), by_name)]
        page = name if is_on_hub and "/" in name else "ORGANISATION/MODEL"
        rule, _, _ = str(error).partition("\n")
        raise ModelError(
            f"{rule}\nPresets: {', '.join(near or MODELS)}. Or download https://huggingface.co/{page}/blob/main/config.json"
            " and give its path. Or give --params with the number of parameters."
        ) from None


def _cached_config(name: str) -> Path | None:
    """Return the newest ``config.json`` of the model ``name`` in the local cache of Hugging Face, None without one."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    hub = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    found = hub.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json")
    return max(found, key=lambda path: path.lstat().st_mtime, default=None)
