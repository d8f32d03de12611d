"""Read, call and replace private attributes of DeepSpeed's objects, and of PyTorch's modules and optimizers.

Only this folder, and the hooks that ``stage3.py`` and its base classes override, depend on private names. Names that
older releases lack are replaced where they are used, here and in ``spans.py``, and hooks at the end of this file.
``device/kernels/arithmetic.py`` finds the powers of beta before 0.19 by trying, ``step()`` before 0.19.8 continues
after a norm that is inf or NaN, and ``start/refusals.py`` refuses missing features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero import utils as zero_utils

from deep_opt_states import log
from perf_model.schedule.workload import Partition

Parameter: TypeAlias = Any
"""A ``torch.nn.Parameter`` with the attributes that ZeRO-3 adds (``ds_id`` and others)."""


def masters_dtype(optimizer: Any) -> torch.dtype:
    """Return the dtype of the master weights, and of the gradients that update them."""
    # Before 0.18.3, both are always fp32.
    return getattr(optimizer, "master_weights_and_grads_dtype", torch.float32)


def param_dict(ds_config: Any) -> dict[str, Any]:
    """Return the user's JSON that the ``DeepSpeedConfig`` was made from."""
    return ds_config._param_dict


def config_of(engine: Any) -> Any:
    return engine._config


def has_bf16_masters(ds_config: Any) -> bool:
    """Return whether the config requests bf16 master weights, which exist since 0.18.3."""
    return bool(getattr(ds_config.bfloat16_config, "bf16_master_weights_and_grads", False))


def breakdown_forbids_deferring(ds_config: Any) -> bool:
    """Return whether DeepSpeed times ``step()`` separately, so that updates must end in it; log the consequence."""
    if ds_config.wall_clock_breakdown:
        log.warn(
            '"wall_clock_breakdown", which "flops_profiler" enables as well, times step() with the whole update in it: '
            "updates are not overlapped with the next forward"
        )
    return bool(ds_config.wall_clock_breakdown)


def unsynchronize_throughput_timer(ds_config: Any) -> None:
    """Make the throughput timer use the host's clock, unless the user has set ``synchronized`` to true."""
    timer = ds_config.timers_config
    if not (timer.enabled and timer.synchronized):
        return
    timer.synchronized = "synchronized" in param_dict(ds_config).get("timers", {}).get("throughput", {})
    if timer.synchronized:
        log.warn(
            '"timers": {"throughput": {"synchronized": true}} waits for the whole device in each step: updates on the '
            "GPU are not overlapped with the next forward"
        )


def checkpoint_files(engine: Any, folder: str, tag: str) -> tuple[list[Path], int, Path]:
    """Return this rank's files with the model's state, the number of these of all ranks, and the optimizer's file."""
    # If another number of ranks shared the model, the first are several or none.
    own = Path(engine._get_ckpt_name(folder, tag))
    found = [Path(name) for name in engine._get_all_ckpt_names(folder, tag)]
    optimizer = Path(engine._get_zero_ckpt_name(folder, tag))
    old_name = optimizer.with_name(optimizer.name.replace("_optim_states.pt", "optim_states.pt"))
    if old_name.exists() and not optimizer.exists():
        optimizer = old_name
    return [own] if own in found else found, len(found), optimizer


def checkpoint_writers(engine: Any) -> tuple[tuple[Any, str], ...]:
    """Return the owners and names of the methods by which a rank writes files of a checkpoint."""
    writer = engine.checkpoint_engine
    return (writer, "makedirs"), (writer, "save"), (engine, "_copy_recovery_script")


def has_custom_loading(module: torch.nn.Module) -> bool:
    """Return whether hooks, or methods that are not PyTorch's, decide which state dicts the module can load."""
    methods = [module.load_state_dict, *(inner._load_from_state_dict for inner in module.modules())]
    return not all(map(_is_method_of_torch_nn, methods)) or any(
        inner._load_state_dict_pre_hooks or inner._load_state_dict_post_hooks for inner in module.modules()
    )


def _is_method_of_torch_nn(method: Any) -> bool:
    """Return whether ``torch.nn`` defines the method, and not a ``functools.wraps`` wrapper of one."""
    return (getattr(method, "__module__", None) or "").startswith("torch.nn.") and not hasattr(method, "__wrapped__")


def num_step_hooks(optimizer: torch.optim.Optimizer) -> int:
    """Return how many hooks PyTorch's ``optimizer.step()`` would call."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return sum(len(getattr(optimizer, name, ())) for name in names)


# The stage-3 optimizer. ``optimizer`` is a ``DeepSpeedZeroOptimizer_Stage3``.


def is_boundary(optimizer: Any) -> bool:
    """Return whether this backward ends an accumulation window."""
    found = optimizer.is_gradient_accumulation_boundary
    # Before 0.19.5, it is an attribute.
    return bool(found() if callable(found) else found)


def norm_dtype() -> torch.dtype:
    # Before 0.19.6, it is fp64 also on accelerators without fp64.
    return getattr(zero_utils, "get_norm_dtype", lambda: torch.float64)()


def forget_gradient_buffers(optimizer: Any) -> None:
    """Drop stock's buffer for sums of gradients. Stock still reads its device."""
    optimizer.grad_partitions_flat_buffer = torch.empty(0, dtype=optimizer.gradient_accumulation_dtype, device="cpu")
    optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition = {}


def drop_gradients_in_buckets(optimizer: Any) -> None:
    """Drop all gradients that have not been reduced. No copy into a bucket is in flight."""
    for bucket in optimizer.ipg_buckets.values():
        # Before 0.18.5, the method of the bucket that does this also drops its buffer.
        bucket.params.clear()
        bucket.elements = 0
    for params in optimizer.fp16_groups:
        optimizer.free_grad_in_param_list(params)


def add_grad_hooks(optimizer: Any, handles: Iterable[Any]) -> None:
    """Let DeepSpeed remove the hooks with these handles together with its own."""
    optimizer._grad_acc_hooks.extend(handles)


def flat_parameters(optimizer: Any) -> list[torch.Tensor]:
    """Return the flat 16-bit buffers, by sub-group, without the wait of ``WaitsBeforeRead``."""
    return vars(optimizer)["fp16_partitioned_groups_flat"]


def restore_param_views(optimizer: Any, sub_group_id: int) -> None:
    """Make the partitions views of the flat 16-bit buffer again. Stock's method would wait for flushes in flight."""
    params = vars(optimizer)["fp16_partitioned_groups"][sub_group_id]
    for param, view in zip(params, optimizer.unflatten(flat_parameters(optimizer)[sub_group_id], params), strict=True):
        param.data = view.data


@contextmanager
def waits_for_current_stream(accelerator: Any) -> Iterator[None]:
    """Make DeepSpeed wait for the current stream, which has waited for its gathers, and not for the whole device."""
    if accelerator.resolves_data_dependency():
        yield
        return
    accelerator.synchronize = lambda device_index=None: accelerator.current_stream(device_index).synchronize()
    try:
        yield
    finally:
        del accelerator.synchronize


def partition_rank(optimizer: Any, param: Parameter) -> int:
    """Return the index of this rank's partition of ``param``."""
    # Before 0.19.3, the same ranks share all parameters.
    find = getattr(optimizer, "_get_param_partition_rank", lambda param: dist.get_rank(optimizer.dp_process_group))
    return find(param)


def has_gradient_here(optimizer: Any, param: Parameter) -> bool:
    """Return whether this rank's partition of ``param`` contains more than padding, as in ``partition_grads``."""
    return param.partition_numel() * partition_rank(optimizer, param) < param.ds_numel


def place_of_gradient(optimizer: Any, param: Parameter) -> tuple[int, int, int]:
    """Return the sub-group of ``param``, the position of its first element there, and its length on this rank."""
    return tuple(optimizer.grad_position[optimizer.get_param_id(param)])


def all_gather_partitions(optimizer: Any, param: Parameter, partition: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, in the shape of ``param``; a collective over the ranks that hold a ``partition``."""
    return optimizer._fp32_state_allgather(param, partition)


def l2_norm(optimizer: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return the L2 norm of ``tensor``, added up in stock's order."""
    return optimizer._constant_buffered_norm2(tensor)


def sub_group_process_group(optimizer: Any, sub_group_id: int) -> Any:
    """Return the process group whose ranks share the parameters of the sub-group."""
    # Before 0.19.3, all sub-groups have the same ranks.
    find = getattr(optimizer, "_get_sub_group_process_group", lambda sub_group_id: optimizer.dp_process_group)
    return find(sub_group_id)


def expert_parallel_group(optimizer: Any, params: list[Parameter]) -> Any:
    """Return the expert-parallel group of ``params``, or None if they are no experts."""
    find = getattr(optimizer, "_autoep_expert_parallel_group", lambda params: None)
    return find(params)


def model_parallel_all_reduce(optimizer: Any, tensor: torch.Tensor, op: Any) -> None:
    """Reduce ``tensor`` over the model-parallel ranks, in place, if there are any."""
    optimizer._model_parallel_all_reduce(tensor=tensor, op=op)


def partitions_by_name(optimizer: Any) -> list[list[Partition]]:
    """Return this rank's partition of each parameter, under its first name, by sub-group and in buffer order."""
    names = {param.ds_id: name for name, param in optimizer.module.named_parameters()}
    persistent = _persistent_ids(optimizer)
    return [
        [Partition(names[param.ds_id], param.partition_numel(), param.ds_id in persistent) for param in group]
        for group in optimizer.fp16_groups
    ]


def partitioned_params(optimizer: Any) -> list[Parameter]:
    """Return the parameters of all sub-groups but the persistent ones."""
    persistent = _persistent_ids(optimizer)
    return [param for group in optimizer.fp16_groups for param in group if param.ds_id not in persistent]


def _persistent_ids(optimizer: Any) -> set[int]:
    return {param.ds_id for param in optimizer.persistent_parameters}


# Hooks that older releases lack


class BackwardBefore_0_18_3:
    """A part of stock's optimizer whose method ``backward`` calls the hook ``backward_prologue`` of later releases."""

    def backward_prologue(self) -> None:
        """Do nothing: the work of later releases here is a part of this ``backward``."""

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients as stock does, after the hook."""
        self.backward_prologue()
        super().backward(*args, **kwargs)  # type: ignore[misc]


class ForwardBefore_0_18_5:
    """A part of stock's optimizer that calls the hook ``clear_backward_seen_flag`` of later releases."""

    module: torch.nn.Module
    _grad_acc_hooks: list[Any]

    def clear_backward_seen_flag(self) -> None:
        """Do nothing: there is no such flag."""

    def create_reduce_and_remove_grad_hooks(self) -> None:
        """Create stock's hooks, and one that is called before each forward, where later engines call the method."""
        super().create_reduce_and_remove_grad_hooks()  # type: ignore[misc]
        before_forward = self.module.register_forward_pre_hook(lambda *args: self.clear_backward_seen_flag())
        self._grad_acc_hooks.append(before_forward)


def with_later_hooks(stock: Any) -> Any:
    """Return stock's class, with the hooks of backward and forward that this release lacks."""
    parts = {"backward_prologue": BackwardBefore_0_18_3, "clear_backward_seen_flag": ForwardBefore_0_18_5}
    missing = [part for name, part in parts.items() if not hasattr(stock, name)]
    return type(stock.__name__, (*missing, stock), {}) if missing else stock
