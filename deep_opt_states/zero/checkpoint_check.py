"""Check the files of a checkpoint before DeepSpeed loads it, so that a refused one changes nothing.

DeepSpeed restores a checkpoint part by part. If a file turns out to be damaged in between, parts of the engine are from
the checkpoint and others are not, and the other ranks wait for the one that has failed. So each rank first reads the
structure of its two files, without the data of tensors, and the ranks agree on the result. Damaged data in a tensor is
not noticed, as with stock. Universal checkpoints are not checked.
"""

from __future__ import annotations

import inspect
import zipfile
from collections.abc import Callable, Iterator, Mapping
from numbers import Number
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase

from deep_opt_states.zero.internals.agreement import gather_values
from deep_opt_states.zero.internals.compat import checkpoint_files, renames_when_loaded
from deep_opt_states.zero.internals.lr_schedulers import problem_of_scheduler

MOMENTS = ("exp_avg", "exp_avg_sq")
MAX_TAG_BYTES = 4096
MAX_SHOWN = 200
"""Length in characters of the longest value in a message."""


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded. The message has the rule, the value found and the remedy. Nothing has changed."""


def check_before_loading(load: Callable[..., Any], engine: Any, args: Any, kwargs: Any) -> None:
    """Raise ``CheckpointError`` on every rank if ``load(*args, **kwargs)`` would fail on any. A collective."""
    bound = inspect.signature(load).bind(*args, **kwargs)
    bound.apply_defaults()
    if engine.load_universal_checkpoint():
        return
    problems = gather_values(_problem(engine, bound.arguments))
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise CheckpointError(f"{problem} (Found by rank {rank}. The engine is as it was before.)")


def _problem(engine: Any, options: Mapping[str, Any]) -> str | None:
    """Return the problem of the files of this rank, or None."""
    try:
        tag = options["tag"] if options["tag"] is not None else _latest(Path(options["load_dir"]))
        if tag is not None:
            _check_files(engine, options, str(tag))
    except CheckpointError as error:
        return str(error)
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
            f"The file {path} must name a folder beside it, found {_shown(content)}.\n{_other_tags(folder)}"
        )
    return tag


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _other_tags(folder: Path, tag: str = "") -> str:
    """Return the remedy: the newest checkpoints in ``folder`` besides ``tag``."""
    found = [path for path in folder.iterdir() if path.is_dir() and path.name != tag] if _is_folder(folder) else []
    newest = sorted(found, key=lambda path: path.stat().st_mtime)[-3:]
    if not newest:
        return f"Restore the files from a copy, or load another checkpoint: {folder} has no other one."
    return f"Load another checkpoint with tag=..., such as {', '.join(_shown(path.name) for path in newest)}."


def _check_files(engine: Any, options: Mapping[str, Any], tag: str) -> None:
    folder = Path(options["load_dir"])
    model_files, optimizer_file = checkpoint_files(engine, str(folder), tag)
    if not model_files:
        raise CheckpointError(
            f"A checkpoint must have a file of this rank with the model's state, found none in "
            f"{_shown(str(folder / tag))}.\n{_other_tags(folder, tag)}"
        )
    loads_optimizer = options["load_optimizer_states"] and not options["load_module_only"]
    for path in model_files:
        saved = _read(path, folder, tag)
        for problem in _problems_of_model(saved, engine, options, loads_optimizer=loads_optimizer):
            raise _refusal(path, folder, tag, problem)
    if loads_optimizer:
        saved = _read(optimizer_file, folder, tag)
        for problem in _problems_of_optimizer(saved, engine.optimizer):
            raise _refusal(optimizer_file, folder, tag, problem)


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
        reason = f"{type(error).__name__}: {_shown(str(error))}"
        raise CheckpointError(
            f"The file {path} must be complete and as torch.save has written it, found one that cannot be read "
            f"({reason}).\n{_other_tags(folder, tag)}"
        ) from None


def _problems_of_model(saved: Any, engine: Any, options: Mapping[str, Any], *, loads_optimizer: bool) -> Iterator[str]:
    """Yield each difference from the state of ``engine`` in the file with the model's state."""
    if not isinstance(saved, dict) or not isinstance(saved.get("module"), Mapping):
        yield f"it must have the model's state under 'module', found {_shown(saved)}"
        return
    needed = ["dp_world_size"]
    if not options["load_module_only"]:
        needed += ["global_steps", "skipped_steps", "mp_world_size"]
    for key in needed:
        if not isinstance(saved.get(key), int):
            yield f"{key} must be an integer, found {_shown(saved.get(key))}"
    if loads_optimizer and saved["dp_world_size"] != engine.seq_dp_world_size:
        yield (
            f"the states of {saved['dp_world_size']} data-parallel ranks can only be loaded by as many, found "
            f"{engine.seq_dp_world_size}; a universal checkpoint (ds_to_universal) can be loaded by any number"
        )
    if not options["load_module_only"] and options["load_lr_scheduler_states"] and engine.lr_scheduler is not None:
        if "lr_scheduler" not in saved:
            yield f"it must have the LR scheduler's state under 'lr_scheduler', found {_shown(saved)}"
        elif (rule := problem_of_scheduler(engine.lr_scheduler, saved["lr_scheduler"])) is not None:
            yield f"lr_scheduler: {rule}, found {_shown(saved['lr_scheduler'])}"
    if options["custom_load_fn"] is None and loads_optimizer and not engine.has_moe_layers:
        yield from _problems_of_module(saved["module"], engine.module, strict=options["load_module_strict"])
    yield from _problems_of_frozen(saved.get("frozen_param_fragments"), engine)


def _problems_of_module(saved: Mapping[str, Any], module: torch.nn.Module, *, strict: bool) -> Iterator[str]:
    if renames_when_loaded(module):
        return
    if strict and saved.keys() != (names := module.state_dict().keys()):
        missing, unexpected = sorted(names - saved.keys()), sorted(map(str, saved.keys() - names))
        yield f"the model must have the same names, found {_shown(missing)} missing and {_shown(unexpected)} added"
    shapes = {name: buffer.shape for name, buffer in module.named_buffers()}
    for name, param in module.named_parameters():
        # A partitioned parameter has no elements in this file.
        shapes[name] = torch.Size([0]) if hasattr(param, "ds_id") else param.shape
    for name, shape in shapes.items():
        if name in saved and not (isinstance(saved[name], torch.Tensor) and saved[name].shape == shape):
            yield f"{name} must be a tensor of shape {tuple(shape)}, found {_described(saved[name])}"


def _problems_of_frozen(saved: Any, engine: Any) -> Iterator[str]:
    if saved is None:
        return
    for param in engine.module.parameters():
        if not param.requires_grad and hasattr(param, "ds_tensor"):
            name = engine.param_names.get(param)
            found = saved.get(name) if isinstance(saved, Mapping) else None
            if not _has_numel(found, param.ds_tensor.numel()):
                yield (
                    f"the frozen parameter {name} must have {param.ds_tensor.numel()} elements on this rank, found "
                    f"{_described(found)}"
                )


def _problems_of_optimizer(saved: Any, optimizer: Any) -> Iterator[str]:
    """Yield each difference from the states of ``optimizer`` in the file with its states."""
    states = saved.get(OPTIMIZER_STATE_DICT) if isinstance(saved, dict) else None
    inner = states.get(OPTIMIZER_STATE_DICT) if isinstance(states, dict) else None
    if not isinstance(states, dict) or not isinstance(inner, dict):
        yield f"it must have the optimizer's states under {OPTIMIZER_STATE_DICT!r}, found {_shown(saved)}"
        return
    for key, kind in (
        ("loss_scaler", LossScalerBase),
        ("dynamic_loss_scale", bool),
        ("overflow", (bool, torch.Tensor)),
    ):
        if not isinstance(states.get(key), kind):
            yield f"{key} must be as DeepSpeed saves it, found {_shown(states.get(key))}"
    numels = [master.numel() for master in optimizer.fp32_partitioned_groups_flat]
    masters = states.get(FP32_FLAT_GROUPS)
    if not isinstance(masters, list) or len(masters) != len(numels):
        found = len(masters) if isinstance(masters, list) else _shown(masters)
        yield f"the number of sub-groups must be {len(numels)}, found {found}; sub_group_size must be as it was"
        return
    for index, (master, numel) in enumerate(zip(masters, numels, strict=True)):
        if not _has_numel(master, numel):
            yield f"sub-group {index} must have {numel} elements, found {_described(master)}"
    yield from _problems_of_param_groups(inner.get("param_groups"), optimizer)
    moments = inner.get("state")
    if not isinstance(moments, dict) or not set(moments) <= set(range(len(numels))):
        yield f"the moments must be by sub-group, found {_shown(moments)}"
        return
    for index, state in moments.items():
        if not isinstance(state, dict) or not _is_like(state.get("step", 0), 0):
            yield (
                f"the state of sub-group {index} must have a number of steps, found "
                f"{_shown(state.get('step') if isinstance(state, dict) else state)}"
            )
            return
        for key in MOMENTS:
            if key in state and not _has_numel(state[key], numels[index]):
                yield f"{key} of sub-group {index} must have {numels[index]} elements, found {_described(state[key])}"


def _problems_of_param_groups(saved: Any, optimizer: Any) -> Iterator[str]:
    ours = optimizer.optimizer.param_groups
    if not isinstance(saved, list) or len(saved) != len(ours):
        found = len(saved) if isinstance(saved, list) else _shown(saved)
        yield f"the number of param groups must be {len(ours)}, found {found}"
        return
    groups = list(optimizer.sub_group_to_group_id.values())
    for index, (group, our_group) in enumerate(zip(saved, ours, strict=True)):
        params = group.get("params") if isinstance(group, dict) else None
        if not isinstance(params, list) or len(params) != groups.count(index):
            yield f"param group {index} must have {groups.count(index)} sub-groups, found {_shown(params)}"
            return
        for key in ("lr", "betas", "eps", "weight_decay", "bias_correction"):
            if not _is_like(group.get(key), our_group[key]) or group.get(key) is None:
                yield f"{key} of param group {index} must be like {our_group[key]}, found {_shown(group.get(key))}"


def _has_numel(value: Any, numel: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == numel


def _is_like(value: Any, ours: Any) -> bool:
    """Return whether ``value`` has the types of ``ours``. Any number is like any other, and None is like everything."""
    if value is None or ours is None:
        return True
    if isinstance(ours, (list, tuple)):
        if not isinstance(value, (list, tuple)):
            return False
        return all(_is_like(entry, ours[0]) for entry in value) if ours else True
    if isinstance(ours, (Number, torch.Tensor)):
        return isinstance(value, (Number, torch.Tensor))
    return isinstance(value, type(ours))


def _described(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else _shown(value)


def _shown(value: Any) -> str:
    """Return the beginning of ``value`` in one printable line."""
    text = f"the keys {sorted(map(str, value))}" if isinstance(value, dict) else repr(value)
    if len(text) > MAX_SHOWN:
        text = f"{text[:MAX_SHOWN]}..."
    return "".join(letter if letter.isprintable() else " " for letter in text)
