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


_REGISTERED: WeakKeyDictionary[PartitionHooks, None] = WeakKeyDictionary()
"""The hooks of all engines in the order of their creation, which is the same on every rank: hooks call collectives.

The references are weak, so that an engine without ``destroy()`` is freed.
"""

_IN_ALL_GATHER = ContextVar("in_all_gather", default=False)
"""Whether ``_all_gather`` runs."""

_REPLACED: dict[str, Callable[..., Any]] = {}
"""DeepSpeed's methods, while they are replaced."""


def register(hooks: PartitionHooks) -> Callable[[], None]:
    """Call ``hooks`` from now on. Return a function that removes them."""
    if not _REPLACED:
        _REPLACED.update(
            _all_gather=Init._all_gather,
            _ensure_availability_of_partitioned_params=Init._ensure_availability_of_partitioned_params,
            _partition=Init._partition,
        )
        Init._all_gather = _hooked_all_gather(Init._all_gather)
        # ``all_gather_coalesced``, which is no method of ``Init``, begins with this one. So does ``_all_gather``.
        Init._ensure_availability_of_partitioned_params = _hooked_coalesced(
            Init._ensure_availability_of_partitioned_params
        )
        Init._partition = _hooked_partition(Init._partition)
    _REGISTERED[hooks] = None

    def remove() -> None:
        _REGISTERED.pop(hooks, None)
        if not _REGISTERED:
            for name, method in _REPLACED.items():
                setattr(Init, name, method)
            _REPLACED.clear()

    return remove


def _hooked_all_gather(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def all_gather(init: Any, param_list: Sequence[Parameter], *args: Any, **kwargs: Any) -> Any:
        for hooks in list(_REGISTERED):
            hooks.before_all_gather(param_list)
        token = _IN_ALL_GATHER.set(True)
        try:
            return method(init, param_list, *args, **kwargs)
        finally:
            _IN_ALL_GATHER.reset(token)

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
