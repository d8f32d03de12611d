"""Call hooks before DeepSpeed reads partitions of parameters, or replaces them by values that a caller has written.

Methods of a list's first parameter gather the whole list, and that parameter may belong to another model. So the hooks
are in the methods of ``zero.Init``, which receive the list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any
from weakref import ref

import torch
from deepspeed.runtime.zero.partition_parameters import Init

from deep_opt_states.zero.internals.compat import Parameter

_REGISTERED: list[ref[Any]] = []
"""The hooks of all engines in the order of their creation, as on every rank: hooks call collectives.

The references are weak, so that an engine without ``destroy()`` is freed.
"""

_IN_ALL_GATHER = ContextVar("in_all_gather", default=False)

_REPLACED: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
"""DeepSpeed's methods by name, each with its replacement."""


def _call(hook: str, params: Sequence[Parameter]) -> None:
    for reference in _REGISTERED.copy():
        if (hooks := reference()) is not None:
            getattr(hooks, hook)(params)


def before_new_engine(module: torch.nn.Module) -> None:
    """Call the hooks of all engines before another one, which may share parameters, is created for ``module``."""
    _call("before_new_engine", [param for param in module.parameters() if hasattr(param, "ds_id")])


def register(hooks: Any) -> Callable[[], None]:
    """Call the hooks of one engine from now on, and return a function that removes them.

    ``before_all_gather``, ``before_all_gather_coalesced`` (by forward or backward, whose stream is current),
    ``before_write`` (by a caller) and ``before_new_engine`` receive all parameters of a call, also of other models.
    """
    for name, replacement in _REPLACEMENTS.items():
        if name not in _REPLACED:
            method = getattr(Init, name)
            _REPLACED[name] = method, _bound(replacement, method)
            setattr(Init, name, _REPLACED[name][1])
    reference = ref(hooks)
    _REGISTERED.append(reference)

    def remove() -> None:
        # Also the hooks of engines that were freed.
        _REGISTERED[:] = [other for other in _REGISTERED if other is not reference and other() is not None]
        if _REGISTERED:
            return
        for name, (method, replacement) in list(_REPLACED.items()):
            # If other code has replaced the method since, ours stays below it and calls no hooks.
            if getattr(Init, name) is replacement:
                setattr(Init, name, method)
                del _REPLACED[name]

    return remove


def _bound(replacement: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    return wraps(method)(lambda *args, **kwargs: replacement(method, *args, **kwargs))


def _all_gather(method: Any, init: Any, param_list: Sequence[Parameter], *args: Any, **kwargs: Any) -> Any:
    _call("before_all_gather", param_list)
    try:
        _IN_ALL_GATHER.set(True)
        return method(init, param_list, *args, **kwargs)
    finally:
        _IN_ALL_GATHER.set(False)


def _ensure_availability(method: Any, init: Any, params: Sequence[Parameter]) -> Any:
    if not _IN_ALL_GATHER.get():
        _call("before_all_gather_coalesced", params)
    return method(init, params)


def _partition(
    method: Any,
    init: Any,
    param_list: Sequence[Parameter],
    force: bool = False,
    has_been_updated: bool = False,
    free_data: bool = True,
) -> Any:
    if has_been_updated:
        _call("before_write", param_list)
    return method(init, param_list, force, has_been_updated, free_data)


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "_all_gather": _all_gather,
    # ``all_gather_coalesced``, which is no method of ``Init``, starts with this one, as ``_all_gather`` does.
    "_ensure_availability_of_partitioned_params": _ensure_availability,
    "_partition": _partition,
}
