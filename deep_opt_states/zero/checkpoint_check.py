"""Check the files of a checkpoint before DeepSpeed loads it, so that a refused one changes nothing.

DeepSpeed would restore a part of a damaged checkpoint, and the other ranks would hang. So each rank first reads the
structure of its files, without tensor data. Universal checkpoints are not checked.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from deep_opt_states.zero.checkpoint_contents import problem_of_model, problem_of_optimizer, shown
from deep_opt_states.zero.internals.agreement import gather_values
from deep_opt_states.zero.internals.compat import checkpoint_files


class CheckpointError(ValueError):
    """The error for a checkpoint that cannot be loaded. Nothing changed."""


def check_before_loading(engine: Any, args: Any, kwargs: Any) -> None:
    """Raise ``CheckpointError`` on every rank if this load would fail on any. This is a collective over all ranks."""
    try:
        options = _options(*args, **kwargs)
    except TypeError:
        # DeepSpeed raises the same error, unless another package has replaced the method.
        return
    if engine.load_universal_checkpoint():
        return
    for rank, problem in enumerate(gather_values(_problem(engine, options))):
        if problem is not None:
            raise CheckpointError(f"{problem} (Found by rank {rank}. The engine is as it was before.)")


def _options(
    load_dir: Any,
    tag: Any = None,
    load_module_strict: Any = True,
    load_optimizer_states: Any = True,
    load_lr_scheduler_states: Any = True,
    load_module_only: Any = False,
    custom_load_fn: Any = None,
    **_: Any,
) -> dict[str, Any]:
    """Return the arguments of DeepSpeed's method by name. Ignore keywords that another package adds."""
    return locals()


def _problem(engine: Any, options: Mapping[str, Any]) -> str | None:
    """Return the problem of this rank's files, or None. Raise nothing: the other ranks wait for the answer."""
    folder, tag = Path(options["load_dir"]), options["tag"]
    try:
        if tag is None and not (folder / "latest").is_file():
            return None
        tag = str(tag) if tag is not None else (folder / "latest").read_text().strip()
        problem = _problem_of_files(engine, options, folder, tag)
    except Exception as error:  # noqa: BLE001 (from the file system, or from methods of the user's model)
        problem = (
            f"Each rank must be able to read the files of a checkpoint and to compare them with its engine, found "
            f"{shown(error)} in {shown(str(folder))}."
        )
    return None if problem is None else f"{problem}\nRestore it from a copy, or load another checkpoint with tag=..."


def _problem_of_files(engine: Any, options: Mapping[str, Any], folder: Path, tag: str) -> str | None:
    of_model, num_files, of_optimizer = checkpoint_files(engine, str(folder), tag)
    if not of_model:
        place = shown(str(folder / tag))
        return f"A checkpoint must have a file of this rank with the model's state, found none in {place}."
    loads_optimizer = options["load_optimizer_states"] and not options["load_module_only"]
    for path in [*of_model, *([of_optimizer] if loads_optimizer else [])]:
        if not path.is_file():
            return f"A checkpoint must have the file {path}, found {'something else' if path.exists() else 'nothing'}."
        try:
            # Only an archive can be memory-mapped; any other file is read as a whole.
            saved = torch.load(path, map_location="cpu", weights_only=False, mmap=zipfile.is_zipfile(path))
        except Exception as error:  # noqa: BLE001 (a damaged pickle may raise anything)
            return f"The file {path} must be as torch.save wrote it, found one that cannot be read: {shown(error)}."
        if path == of_optimizer:
            problem = problem_of_optimizer(saved, engine.optimizer)
        else:
            problem = problem_of_model(saved, engine, options, loads_optimizer=loads_optimizer, num_files=num_files)
        if problem is not None:
            return f"The file {path} of a checkpoint must match this engine: {problem}."
    return None
