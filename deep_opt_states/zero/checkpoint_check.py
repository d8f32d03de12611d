"""Check the files of a checkpoint before DeepSpeed loads it, so that a refused one changes nothing.

DeepSpeed restores a checkpoint part by part: a damaged file would leave an engine of which only parts are restored, and
ranks that wait for the one that has failed. So each rank first reads the structure of its two files, without the data
of tensors, and the ranks agree on the result. Universal checkpoints are not checked.
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
    """Raise ``CheckpointError`` on every rank if ``engine.load_checkpoint(*args, **kwargs)`` would fail on any.

    This is a collective over all ranks.
    """
    try:
        options = _options(*args, **kwargs)
    except TypeError:
        # DeepSpeed raises the same error, unless another package has replaced the method by one of its own.
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
    """Return the arguments of DeepSpeed's method by name, and accept keywords that another package adds."""
    return locals()


def _problem(engine: Any, options: Mapping[str, Any]) -> str | None:
    """Return the problem of the files of this rank, or None. Raise nothing: the other ranks wait for the answer."""
    folder, tag = Path(options["load_dir"]), options["tag"]
    try:
        if tag is None and not (folder / "latest").is_file():
            # DeepSpeed loads nothing then.
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
            # Memory cannot be mapped to a file that is no archive: the whole file is read then.
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
