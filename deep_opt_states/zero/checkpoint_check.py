"""Check the files of a checkpoint before DeepSpeed loads it, so that a refused one changes nothing.

DeepSpeed would restore a part of a damaged checkpoint, and the other ranks would hang. So each rank first reads the
structure of its files, without tensor data. Universal checkpoints are not checked.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
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
    if not isinstance(saved, dict) or not isinstance(saved.get("module"), Mapping):
        return f"it must have the model's state under 'module', found {shown(saved)}"
    loads_all = not options["load_module_only"]
    for key in ("dp_world_size", *(("global_steps", "skipped_steps", "mp_world_size") if loads_all else ())):
        if not isinstance(saved.get(key), int):
            return f"{key} must be an integer, found {shown(saved.get(key))}"
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
    problem = None
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
    for name in sorted(shapes.keys() & names & saved.keys()):
        if not (isinstance(saved[name], torch.Tensor) and saved[name].shape == shapes[name]):
            return f"{name} must be a tensor of shape {tuple(shapes[name])}, found {_described(saved[name])}"
    return None


def _problem_of_frozen(saved: Any, engine: Any) -> str | None:
    for param in engine.module.parameters() if saved is not None else ():
        if not param.requires_grad and hasattr(param, "ds_tensor"):
            name, numel = engine.param_names.get(param), param.ds_tensor.numel()
            found = saved.get(name) if isinstance(saved, Mapping) else None
            if not _has_numel(found, numel):
                return f"the frozen parameter {name} must have {numel} elements on this rank, found {_described(found)}"
    return None


def _problem_of_optimizer(saved: Any, optimizer: Any) -> str | None:
    """Return the first difference between the file with the optimizer's states and ``optimizer``, or None."""
    states = saved.get(OPTIMIZER_STATE_DICT) if isinstance(saved, dict) else None
    inner = states.get(OPTIMIZER_STATE_DICT) if isinstance(states, dict) else None
    if not isinstance(states, dict) or not isinstance(inner, dict):
        return f"it must have the optimizer's states under {OPTIMIZER_STATE_DICT!r}, found {shown(saved)}"
    kinds = {"loss_scaler": LossScalerBase, "dynamic_loss_scale": bool, "overflow": (bool, torch.Tensor)}
    for key, kind in kinds.items():
        if not isinstance(states.get(key), kind):
            return f"{key} must be as DeepSpeed saves it, found {shown(states.get(key))}"
    numels = [master.numel() for master in optimizer.fp32_partitioned_groups_flat]
    masters = states.get(FP32_FLAT_GROUPS)
    if not isinstance(masters, list) or len(masters) != len(numels):
        found = len(masters) if isinstance(masters, list) else shown(masters)
        return f"the number of sub-groups must be {len(numels)}, found {found}; sub_group_size must be as it was"
    for index, (master, numel) in enumerate(zip(masters, numels, strict=True)):
        if not _has_numel(master, numel):
            return f"sub-group {index} must have {numel} elements, found {_described(master)}"
    return _problem_of_param_groups(inner.get("param_groups"), optimizer) or _problem_of_moments(
        inner.get("state"), numels
    )


def _problem_of_moments(moments: Any, numels: Sequence[int]) -> str | None:
    if not isinstance(moments, dict) or not set(moments) <= set(range(len(numels))):
        return f"the moments must be by sub-group, found {shown(moments)}"
    for index, state in moments.items():
        if not isinstance(state, dict):
            return f"the state of sub-group {index} must be a dictionary, found {shown(state)}"
        # A sub-group that was never updated has no state. A part of a state would make the next update fail.
        if state and (state.get("step") is None or not _is_like(state["step"], 0)):
            return f"the state of sub-group {index} must have a number of steps, found {shown(state.get('step'))}"
        for key in MOMENTS if state else ():
            if not _has_numel(found := state.get(key), numels[index]):
                return f"{key} of sub-group {index} must have {numels[index]} elements, found {_described(found)}"
    return None


def _problem_of_param_groups(saved: Any, optimizer: Any) -> str | None:
    ours = optimizer.optimizer.param_groups
    if not isinstance(saved, list) or len(saved) != len(ours):
        found = len(saved) if isinstance(saved, list) else shown(saved)
        return f"the number of param groups must be {len(ours)}, found {found}"
    groups = list(optimizer.sub_group_to_group_id.values())
    for index, (group, our_group) in enumerate(zip(saved, ours, strict=True)):
        params = group.get("params") if isinstance(group, dict) else None
        if not isinstance(params, list) or len(params) != groups.count(index):
            return f"param group {index} must have {groups.count(index)} sub-groups, found {shown(params)}"
        for key in ("lr", "betas", "eps", "weight_decay", "bias_correction"):
            if not _is_like(group.get(key), our_group[key]) or group.get(key) is None:
                return f"{key} of param group {index} must be like {our_group[key]}, found {shown(group.get(key))}"
    return None


def _has_numel(value: Any, numel: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == numel


def _is_like(value: Any, ours: Any) -> bool:
    """Return whether ``value`` has the types of ``ours``. Any number is like any other, and None is like everything."""
    if value is None or ours is None:
        return True
    if isinstance(ours, (list, tuple)):
        return isinstance(value, (list, tuple)) and (not ours or all(_is_like(entry, ours[0]) for entry in value))
    if isinstance(ours, (Number, torch.Tensor)):
        return isinstance(value, (Number, torch.Tensor))
    return isinstance(value, type(ours))


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
