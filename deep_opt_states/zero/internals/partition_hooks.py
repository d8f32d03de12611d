"""Call hooks before DeepSpeed reads partitions of parameters, or replaces them by values that a caller has written.

DeepSpeed adds ``all_gather``, ``all_gather_coalesced`` and ``partition`` to each parameter, and calls those of the
first parameter of a list for the whole list. That parameter may belong to another model: ``GatheredParameters`` sorts
its parameters by the time of their creation. So the hooks are in the methods of ``zero.Init`` that receive the list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from deepspeed.runtime.zero.partition_parameters import Init

from deep_opt_states.zero.internals.compat import Parameter


class PartitionHooks(Protocol):
    """The hooks of one engine. Each receives all parameters of a call, also those of other models."""

    def before_all_gather(self, params: Sequence[Parameter]) -> None:
        """Prepare a gather by any other reader than forward and backward."""

    def before_all_gather_coalesced(self, params: Sequence[Parameter]) -> None:
        """Prepare a gather by forward or backward, whose stream is current."""

    def before_write(self, params: Sequence[Parameter]) -> None:
        """Prepare a write to partitions. The caller has written to the gathered parameters."""

    def before_new_engine(self, params: Sequence[Parameter]) -> None:
        """Prepare another engine for these parameters, which reads partitions; every rank calls this."""


_REGISTERED: WeakKeyDictionary[PartitionHooks, None] = WeakKeyDictionary()
"""The hooks of all engines in the order of their creation, which is the same on every rank: hooks call collectives.

The references are weak, so that an engine without ``destroy()`` is freed.
"""


def before_new_engine(module: torch.nn.Module) -> None:
    """Call the hooks of the engines that have parameters of ``module``, for which another engine is created."""
    params = [param for param in module.parameters() if hasattr(param, "ds_id")]
    for hooks in list(_REGISTERED):
        hooks.before_new_engine(params)


_IN_ALL_GATHER = ContextVar("in_all_gather", default=False)
"""Whether ``_all_gather`` runs."""

_REPLACED: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
"""DeepSpeed's methods by name, each with the method that replaces it."""


def register(hooks: PartitionHooks) -> Callable[[], None]:
    """Call ``hooks`` from now on. Return a function that removes them."""
    # ``all_gather_coalesced`` is no method of ``Init``. It begins with ``_ensure_availability_of_partitioned_params``,
    # as ``_all_gather`` does.
    for name, hooked in (
        ("_all_gather", _hooked_all_gather),
        ("_ensure_availability_of_partitioned_params", _hooked_coalesced),
        ("_partition", _hooked_partition),
    ):
        if name not in _REPLACED:
            method = getattr(Init, name)
            _REPLACED[name] = method, hooked(method)
            setattr(Init, name, _REPLACED[name][1])
    _REGISTERED[hooks] = None

    def remove() -> None:
        _REGISTERED.pop(hooks, None)
        if _REGISTERED:
            return
        for name, (method, replacement) in list(_REPLACED.items()):
            # Where other code has replaced the method in the meantime, ours stays below it, and calls no hooks.
            if getattr(Init, name) is replacement:
                setattr(Init, name, method)
                del _REPLACED[name]

    return remove


def _hooked_all_gather(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def all_gather(init: Any, param_list: Sequence[Parameter], *args: Any, **kwargs: Any) -> Any:
        for hooks in list(_REGISTERED):
            hooks.before_all_gather(param_list)
        try:
            _IN_ALL_GATHER.set(True)
            return method(init, param_list, *args, **kwargs)
        finally:
            _IN_ALL_GATHER.set(False)

    return all_gather


def _hooked_coalesced(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def ensure_availability(init: Any, params: Sequence[Parameter]) -> Any:
        if not _IN_ALL_GATHER.get():
            for hooks in list(_REGISTERED):
                hooks.before_all_gather_coalesced(params)
        return method(init, params)

    return ensure_availability


def _hooked_partition(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def partition(
        init: Any,
        param_list: Sequence[Parameter],
        force: bool = False,
        has_been_updated: bool = False,
        free_data: bool = True,
    ) -> Any:
        if has_been_updated:
            for hooks in list(_REGISTERED):
                hooks.before_write(param_list)
        return method(init, param_list, force, has_been_updated, free_data)

    return partition
