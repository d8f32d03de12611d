"""List the hooks and private names of DeepSpeed that the plugin uses, and look for them in another release.

The source is read, because DeepSpeed's decorators hide the parameters of many methods.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

import deepspeed

from deep_opt_states.zero.internals.releases import is_at_least

_STAGE3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator"

HOOKS = {
    "_configure_offloading": "offload_optimizer_config offload_param_config *",
    "_create_fp32_partitions": "",
    "_finalize_offload_gradient_accumulation": "",
    "_get_fp32_grad_state_partition": "param release_swap_buffers",
    "_get_fp32_opt_state_partition": "param release_swap_buffers optim_state_key *",
    "_get_norm_groups": "",
    "_get_state": "",
    "_optimizer_step": "sub_group_id",
    "_overflow_clean_up": "prev_scale",
    "_post_step": "timer_names",
    "_pre_step": "",
    "_reassign_or_swap_out_partitioned_parameters": "sub_group_id",
    "_release_sub_group": "sub_group_id timer_names",
    "_rigid_load_state_dict": "state_dict load_optimizer_states",
    "_rigid_state_dict": "",
    "_setup_for_real_optimizer": "",
    "backward_prologue": "",
    "checkpoint_event_epilogue": "",
    "checkpoint_event_prologue": "",
    "clear_backward_seen_flag": "",
    "create_reduce_and_remove_grad_hooks": "",
    "destroy": "",
    "get_fp32_grad_partitions": "",
    "get_full_hp_param": "param optim_state_key *",
    "has_overflow": "partition_gradients",
    "initialize_optimizer_states": "",
    "load_hp_checkpoint_state_from_checkpoint_dir_stage3": "checkpoint_dir *",
    "offload_states": "include device pin_memory non_blocking *",
    "partition_grads": "params_to_release grad_partitions",
    "reduce_independent_p_g_buckets_and_remove_grads": "param",
    "reload_states": "non_blocking *",
    "set_fp32_grad_for_param": "value param",
    "set_full_hp_param": "value param optim_state_key *",
    "set_local_grad_for_param": "value param",
    "set_local_hp_param": "value param optim_state_key *",
    "unscale_and_clip_grads": "sub_group_id total_norm",
    "update_fp32_grad_for_param_vectorized": "update_func param_list",
    "zero_grad": "set_to_none",
}
"""The overridden methods of DeepSpeed's optimizer, with their parameters, and ``*`` if ours pass further ones on."""

REPLACED = HOOKS.keys() | {"_ensure_availability_of_partitioned_params", "_partition", "fetch_sub_module"}
"""The methods whose replacements raise ``TypeError`` if DeepSpeed passes further arguments, except those with ``*``."""

METHODS: Mapping[str, Mapping[str, str]] = {
    _STAGE3: {
        **HOOKS,
        "_autoep_expert_parallel_group": "params",
        "_constant_buffered_norm2": "input",
        "_fp32_state_allgather": "param fp32_state_partition",
        "_get_param_coordinator": "",
        "_get_param_partition_rank": "param",
        "_get_sub_group_process_group": "sub_group_id",
        "_model_parallel_all_reduce": "tensor op",
    },
    "deepspeed.runtime.zero.partition_parameters:Init": {
        "_all_gather": "param_list async_op hierarchy *",
        "_ensure_availability_of_partitioned_params": "params",
        "_partition": "param_list force has_been_updated free_data",
    },
    _COORDINATOR: {"fetch_sub_module": "current_submodule forward", "is_complete_trace": ""},
    "deepspeed.runtime.engine:DeepSpeedEngine": {
        "_configure_zero_optimizer": "optimizer *",
        "_do_sanity_check": "*",
        "_get_all_ckpt_names": "checkpoints_path tag",
        "_get_ckpt_name": "checkpoints_path tag",
        "_get_zero_ckpt_name": "checkpoints_path tag",
        "_copy_recovery_script": "save_path",
        "load_checkpoint": "load_dir tag *",
        "save_16bit_model": "save_dir *",
        "save_checkpoint": "save_dir tag *",
    },
    "deepspeed.runtime.config:DeepSpeedConfig": {"_initialize_params": "param_dict *"},
    "deepspeed.utils.nvtx:": {"_range_pop": "accelerator", "_range_push": "accelerator msg"},
}
"""The parameters, without ``self``, of each method that is overridden, wrapped or called, by its class or module.

A release may add parameters to a method with ``*``, and with defaults to one that is not in ``REPLACED``.
"""

ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    _STAGE3: ("_grad_acc_hooks", "__param_id_to_grad_partition"),
    _COORDINATOR: ("__allgather_stream", "__param_order", "__param_queue", "__prefetch_bucket_sz", "__submodule_order"),
    "deepspeed.runtime.engine:DeepSpeedEngine": ("_config",),
    "deepspeed.runtime.config:DeepSpeedConfig": ("_param_dict",),
}
"""The private attributes that the plugin reads or assigns, by their class."""

SINCE: Mapping[str, str] = {
    "_autoep_expert_parallel_group": "0.19.3",
    "_finalize_offload_gradient_accumulation": "0.19.5",
    "_get_param_partition_rank": "0.19.3",
    "_get_sub_group_process_group": "0.19.3",
    "_range_pop": "0.19.0",
    "_range_push": "0.19.0",
    "backward_prologue": "0.18.3",
    "clear_backward_seen_flag": "0.18.5",
}
"""The first release with a method. In older ones, ``compat.py`` or ``spans.py`` replaces it."""


def missing_names(
    methods: Mapping[str, Mapping[str, str]] = METHODS, attributes: Mapping[str, tuple[str, ...]] = ATTRIBUTES
) -> list[str]:
    """Return one line for each name that the installed DeepSpeed lacks, or whose parameters differ."""
    lines = []
    for place in methods.keys() | attributes.keys():
        found, assigned = _defined(place)
        owner = place.partition(":")[2] or place
        for name, parameters in methods.get(place, {}).items():
            if name not in found:
                is_replaced = name in SINCE and not is_at_least(deepspeed.__version__, SINCE[name])
                lines += [] if is_replaced else [f"{owner}.{name} is missing"]
            elif not _can_be_used(name, found[name], parameters.split()):
                shown = " ".join(found[name])
                lines.append(f"{owner}.{name} has the parameters ({shown}), expected ({parameters})")
        lines += [f"{owner}.{name} is missing" for name in attributes.get(place, ()) if name not in assigned]
    return sorted(lines)


def _can_be_used(name: str, found: list[str], expected: list[str]) -> bool:
    named = [parameter for parameter in expected if parameter != "*"]
    known, further = found[: len(named)], found[len(named) :]
    if [parameter.removesuffix("=") for parameter in known] != named:
        return False
    if "*" in expected:
        return True
    return not further if name in REPLACED else all(parameter.endswith(("=", "*")) for parameter in further)


def _defined(place: str) -> tuple[dict[str, list[str]], set[str]]:
    """Return the parameters of each method, and the attributes that are assigned, of a class or a module."""
    module_name, _, class_name = place.partition(":")
    methods: dict[str, list[str]] = {}
    assigned: set[str] = set()
    try:
        module = importlib.import_module(module_name)
        owners = getattr(module, class_name).__mro__ if class_name else [module]
    except (ImportError, AttributeError):
        return methods, assigned
    for node in (node for owner in owners for node in _body(owner)):
        assigned |= {
            child.attr
            for child in ast.walk(node)
            if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store)
        }
        if isinstance(node, ast.FunctionDef):
            methods.setdefault(node.name, [name for name in _parameters(node.args) if name != "self"])
    return methods, assigned


def _parameters(arguments: ast.arguments) -> list[str]:
    """Return the names of the parameters, with ``=`` after one with a default, and ``*`` and ``**`` as in Python."""
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    required = len(positional) - len(arguments.defaults)
    names = positional[:required] + [f"{name}=" for name in positional[required:]]
    names += ["*"] if arguments.vararg or arguments.kwonlyargs else []
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        names.append(argument.arg if default is None else f"{argument.arg}=")
    return names + (["**"] if arguments.kwarg else [])


def _body(owner: Any) -> list[ast.stmt]:
    """Return the statements of a class or a module, or none without Python source."""
    try:
        statements = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    except (TypeError, OSError, SyntaxError):
        return []
    return statements if inspect.ismodule(owner) else statements[0].body  # type: ignore[attr-defined]
