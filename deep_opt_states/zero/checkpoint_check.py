"""Check the files of a checkpoint before DeepSpeed loads it, so that a refused one changes nothing.

DeepSpeed restores a checkpoint part by part. If a file turns out to be damaged in between, parts of the engine are from
the checkpoint and others are not, and the other ranks wait for the one that has failed. So each rank first reads the
structure of its two files, without the data of tensors, and the ranks agree on the result. Damaged data in a tensor is
not noticed, as with stock. Universal checkpoints are not checked.
"""

from __future__ import annotations

import inspect
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from stat import S_ISDIR
from typing import Any

import torch

from deep_opt_states.zero.checkpoint_contents import problem_of_model, problem_of_optimizer, shown
from deep_opt_states.zero.internals.agreement import gather_values
from deep_opt_states.zero.internals.compat import checkpoint_files

MAX_TAG_BYTES = 4096


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded. The message has the rule, the value found and the remedy. Nothing has changed."""


def check_before_loading(load: Callable[..., Any], engine: Any, args: Any, kwargs: Any) -> None:
    """Raise ``CheckpointError`` on every rank if ``load(*args, **kwargs)`` would fail on any.

    This is a collective over all ranks.
    """
    options = _options(load, args, kwargs)
    if options is None or engine.load_universal_checkpoint():
        return
    problems = gather_values(_problem(engine, options))
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise CheckpointError(f"{problem} (Found by rank {rank}. The engine is as it was before.)")


def _load_checkpoint(
    load_dir: Any,
    tag: Any = None,
    load_module_strict: Any = True,
    load_optimizer_states: Any = True,
    load_lr_scheduler_states: Any = True,
    load_module_only: Any = False,
    custom_load_fn: Any = None,
    **_: Any,
) -> None:
    """Declare the parameters of DeepSpeed's method, and accept keywords that another package adds."""


def _options(load: Callable[..., Any], args: Any, kwargs: Any) -> Mapping[str, Any] | None:
    """Return the arguments of ``load(*args, **kwargs)`` by DeepSpeed's names, or None if they do not fit these."""
    signature, of_deepspeed = inspect.signature(load), inspect.signature(_load_checkpoint)
    if not of_deepspeed.parameters.keys() - {"_"} <= signature.parameters.keys():
        # Another package has replaced the method by a function that hides its parameters, such as *args.
        signature = of_deepspeed
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    return bound.arguments


def _problem(engine: Any, options: Mapping[str, Any]) -> str | None:
    """Return the problem of the files of this rank, or None. Raise nothing: the other ranks wait for the answer."""
    try:
        tag = options["tag"] if options["tag"] is not None else _latest(Path(options["load_dir"]))
        if tag is not None:
            _check_files(engine, options, str(tag))
    except CheckpointError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 (from the file system, or from methods of the user's model)
        return (
            f"Each rank must be able to read the files of a checkpoint and to compare them with its engine, found "
            f"{shown(error)}.\nMake the files in {shown(str(options['load_dir']))} readable, or correct the method "
            f"that raises."
        )
    return None


def _latest(folder: Path) -> str | None:
    """Return the tag in the file ``latest``, or None if there is none: DeepSpeed then loads nothing."""
    path = folder / "latest"
    if not path.is_file():
        return None
    content = path.read_bytes()[: MAX_TAG_BYTES + 1]
    try:
        tag = content.decode().strip()
    except UnicodeDecodeError:
        tag = ""
    if not tag or not tag.isprintable() or len(content) > MAX_TAG_BYTES or not _is_folder(folder / tag):
        raise CheckpointError(
            f"The file {path} must name a folder beside it, found {shown(content)}.\n{_other_tags(folder)}"
        )
    return tag


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _other_tags(folder: Path, tag: str = "") -> str:
    """Return the remedy: the newest checkpoints in ``folder`` besides ``tag``."""
    newest = [name for _, name in sorted(_folders(folder)) if name != tag][-3:]
    if not newest:
        return f"Restore the files from a copy, or load another checkpoint: {folder} has no other one."
    return f"Load another checkpoint with tag=..., such as {', '.join(map(shown, newest))}."


def _folders(folder: Path) -> list[tuple[float, str]]:
    """Return the time of the last change, and the name, of each folder in ``folder`` that can be read."""
    found = []
    with suppress(OSError, ValueError):
        for path in folder.iterdir():
            # Another process may remove old checkpoints in the meantime.
            with suppress(OSError):
                status = path.stat()
                if S_ISDIR(status.st_mode):
                    found.append((status.st_mtime, path.name))
    return found


def _check_files(engine: Any, options: Mapping[str, Any], tag: str) -> None:
    folder = Path(options["load_dir"])
    files = checkpoint_files(engine, str(folder), tag)
    if not files.model:
        raise CheckpointError(
            f"A checkpoint must have a file of this rank with the model's state, found none in "
            f"{shown(str(folder / tag))}.\n{_other_tags(folder, tag)}"
        )
    loads_optimizer = options["load_optimizer_states"] and not options["load_module_only"]
    for path in files.model:
        saved = _read(path, folder, tag)
        problem = problem_of_model(
            saved, engine, options, loads_optimizer=loads_optimizer, num_files=files.num_model_parallel
        )
        if problem is not None:
            raise _refusal(path, folder, tag, problem)
    if loads_optimizer:
        saved = _read(files.optimizer, folder, tag)
        problem = problem_of_optimizer(saved, engine.optimizer)
        if problem is not None:
            raise _refusal(files.optimizer, folder, tag, problem)


def _refusal(path: Path, folder: Path, tag: str, problem: str) -> CheckpointError:
    return CheckpointError(
        f"The file {path} of a checkpoint must match this engine: {problem}.\n{_other_tags(folder, tag)}"
    )


def _read(path: Path, folder: Path, tag: str) -> Any:
    """Return the content of a file of ``torch.save``. The data of tensors is not read until someone needs it."""
    if not path.is_file():
        kind = "something else" if path.exists() else "nothing"
        raise CheckpointError(f"A checkpoint must have the file {path}, found {kind}.\n{_other_tags(folder, tag)}")
    try:
        # Memory cannot be mapped to a file that is no archive: the whole file is read then.
        return torch.load(path, map_location="cpu", weights_only=False, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # noqa: BLE001 (a damaged pickle may raise anything)
        raise CheckpointError(
            f"The file {path} must be complete and as torch.save has written it, found one that cannot be read "
            f"({shown(error)}).\n{_other_tags(folder, tag)}"
        ) from None
