"""Check the files of a checkpoint before DeepSpeed loads it, so that a refused one changes nothing.

DeepSpeed would restore a part of a damaged checkpoint, and the other ranks would hang. So each rank first reads the
structure of its files, without tensor data. Universal checkpoints are not checked.
"""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Mapping
from itertools import starmap
from numbers import Number
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase

from deep_opt_states.zero.internals.agreement import gather_values
from deep_opt_states.zero.internals.compat import checkpoint_files, has_custom_loading
from deep_opt_states.zero.internals.lr_schedulers import problem_of_scheduler

MOMENTS = ("exp_avg", "exp_avg_sq")
NUMBER = (Number, torch.Tensor)
MAX_SHOWN = 200


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
            problem = _problem_of_optimizer(saved, engine.optimizer)
        else:
            problem = _problem_of_model(saved, engine, options, loads_optimizer=loads_optimizer, num_files=num_files)
        if problem is not None:
            return f"The file {path} of a checkpoint must match this engine: {problem}."
    return None


def _problem_of_model(
    saved: Any, engine: Any, options: Mapping[str, Any], *, loads_optimizer: bool, num_files: int
) -> str | None:
    """Return the first difference between the file with the model's state and ``engine``, or None."""
    loads_all = not options["load_module_only"]
    counts = ("dp_world_size", *(("global_steps", "skipped_steps", "mp_world_size") if loads_all else ()))
    if (problem := _difference(saved, {"module": Mapping, **dict.fromkeys(counts, int)})) is not None:
        return problem
    # DeepSpeed compares them even where it uses neither.
    saved_by = saved.get("mp_world_size", num_files)
    if not isinstance(saved_by, int) or saved_by != num_files:
        return f"mp_world_size must be {num_files}, the number of files of the model's ranks, found {shown(saved_by)}"
    if loads_optimizer and saved["dp_world_size"] != engine.seq_dp_world_size:
        return (
            f"the states of {saved['dp_world_size']} data-parallel ranks can only be loaded by as many, found "
            f"{engine.seq_dp_world_size}; a universal checkpoint (ds_to_universal) can be loaded by any number"
        )
    if loads_all and options["load_lr_scheduler_states"] and engine.lr_scheduler is not None:
        if "lr_scheduler" not in saved:
            return f"it must have the LR scheduler's state under 'lr_scheduler', found {shown(saved)}"
        if (rule := problem_of_scheduler(engine.lr_scheduler, saved["lr_scheduler"])) is not None:
            return f"lr_scheduler: {rule}, found {shown(saved['lr_scheduler'])}"
    if options["custom_load_fn"] is None and loads_optimizer and not engine.has_moe_layers:
        problem = _problem_of_module(saved["module"], engine.module, strict=options["load_module_strict"])
    return problem or _problem_of_frozen(saved.get("frozen_param_fragments"), engine)


def _problem_of_module(saved: Mapping[str, Any], module: torch.nn.Module, *, strict: bool) -> str | None:
    if has_custom_loading(module):
        return None
    names = module.state_dict().keys()
    if strict and saved.keys() != names:
        missing, unexpected = sorted(names - saved.keys()), sorted(map(str, saved.keys() - names))
        frozen = {name for name, param in module.named_parameters(remove_duplicate=False) if not param.requires_grad}
        # As save_checkpoint(exclude_frozen_parameters=True) does.
        remedy = "; without the frozen parameters, load it with load_module_strict=False"
        return (
            f"the model must have the same names, found {shown(missing)} missing and {shown(unexpected)} added"
            f"{remedy if missing and not unexpected and frozen.issuperset(missing) else ''}"
        )
    shapes = {name: buffer.shape for name, buffer in module.named_buffers()}
    for name, param in module.named_parameters():
        # A partitioned parameter has no elements in this file.
        shapes[name] = torch.Size([0]) if hasattr(param, "ds_id") else param.shape
    return _difference(
        saved, {name: shapes[name] for name in sorted(shapes.keys() & names & saved.keys())}, "the model"
    )


def _problem_of_frozen(saved: Any, engine: Any) -> str | None:
    frozen = [param for param in engine.module.parameters() if not param.requires_grad and hasattr(param, "ds_tensor")]
    shapes = {engine.param_names.get(param): torch.Size([param.ds_tensor.numel()]) for param in frozen}
    return None if saved is None or not shapes else _difference(saved, shapes, "the frozen parameters")


def _problem_of_optimizer(saved: Any, optimizer: Any) -> str | None:
    """Return the first difference between the file with the optimizer's states and ``optimizer``, or None."""
    shapes = [master.shape for master in optimizer.fp32_partitioned_groups_flat]
    counts = Counter(optimizer.sub_group_to_group_id.values())
    hyperparameters = {**dict.fromkeys(("lr", "eps", "weight_decay", "bias_correction"), NUMBER), "betas": [NUMBER] * 2}
    groups = [
        {"params": [object] * counts[index], **hyperparameters}
        for index in range(len(optimizer.optimizer.param_groups))
    ]
    states = {
        "loss_scaler": LossScalerBase,
        "dynamic_loss_scale": bool,
        "overflow": (bool, torch.Tensor),
        FP32_FLAT_GROUPS: shapes,
        OPTIMIZER_STATE_DICT: {"param_groups": groups, "state": dict},
    }
    problem = _difference(saved, {OPTIMIZER_STATE_DICT: states})
    if problem is None:
        moments = saved[OPTIMIZER_STATE_DICT][OPTIMIZER_STATE_DICT]["state"]
        of_sub_group = {index: {"step": NUMBER, **dict.fromkeys(MOMENTS, shape)} for index, shape in enumerate(shapes)}
        if not moments.keys() <= of_sub_group.keys():
            return f"the moments must be by sub-group, found {shown(moments)}"
        # A sub-group that was never updated has no state. A part of a state would make the next update fail.
        updated = {index: of_sub_group[index] for index, state in moments.items() if state != {}}
        problem = _difference(moments, updated, "the moments")
    return None if problem is None else f"{problem}; sub_group_size, model and param groups must be as they were"


def _difference(saved: Any, expected: Any, place: str = "it") -> str | None:
    """Return the first place where ``saved`` does not have the entries, the shape or the types that are ``expected``.

    These are what is expected of each entry of a dictionary or a list, the shape of a tensor, or one or more types.
    """
    if isinstance(expected, dict):
        if not isinstance(saved, Mapping):
            return f"{place} must be a dictionary, found {shown(saved)}"
        entries = [(saved.get(key), inner, f"{place}[{key!r}]") for key, inner in expected.items()]
    elif isinstance(expected, list):
        if not isinstance(saved, (list, tuple)) or len(saved) != len(expected):
            found = len(saved) if isinstance(saved, (list, tuple)) else shown(saved)
            return f"{place} must be a list of {len(expected)} entries, found {found}"
        pairs = enumerate(zip(saved, expected, strict=True))
        entries = [(entry, inner, f"{place}[{index}]") for index, (entry, inner) in pairs]
    elif isinstance(expected, torch.Size):
        matches = isinstance(saved, torch.Tensor) and saved.shape == expected
        return None if matches else f"{place} must be a tensor of shape {tuple(expected)}, found {_described(saved)}"
    else:
        kinds = expected if isinstance(expected, tuple) else (expected,)
        named = " or ".join(kind.__name__ for kind in kinds)
        return None if isinstance(saved, kinds) else f"{place} must be of type {named}, found {shown(saved)}"
    return next(filter(None, starmap(_difference, entries)), None)


def _described(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else shown(value)


def shown(value: Any) -> str:
    """Return the beginning of ``value`` in one printable line."""
    try:
        if isinstance(value, Exception):
            text = f"{type(value).__name__}: {value}"
        else:
            text = f"the keys {sorted(map(str, value))}" if isinstance(value, dict) else repr(value)
    except Exception as error:  # noqa: BLE001 (an object from a file may raise anything)
        text = f"an object of type {type(value).__name__} whose text raises {type(error).__name__}"
    if len(text) > MAX_SHOWN:
        text = f"{text[:MAX_SHOWN]}..."
    return "".join(letter if letter.isprintable() else " " for letter in text)
