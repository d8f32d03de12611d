"""Check that the hooks into DeepSpeed's gathers serve several engines, and are removed with the last one."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from deepspeed.runtime.zero.partition_parameters import Init

from deep_opt_states.zero.internals import partition_hooks

NAMES = ("_all_gather", "_ensure_availability_of_partitioned_params", "_partition")


class RecordedHooks:
    """The hooks of one engine, which append their names and the parameters to ``calls``."""

    def __init__(self, engine: str, calls: list[Any]) -> None:
        self._engine, self._calls = engine, calls

    def before_all_gather(self, params: Sequence[Any]) -> None:
        self._calls.append((self._engine, "all_gather", params))

    def before_all_gather_coalesced(self, params: Sequence[Any]) -> None:
        self._calls.append((self._engine, "all_gather_coalesced", params))

    def before_write(self, params: Sequence[Any]) -> None:
        self._calls.append((self._engine, "write", params))


@pytest.fixture(autouse=True)
def methods() -> Iterator[dict[str, mock.Mock]]:
    """Replace the methods of ``Init``, which need a process group. Check that they are there again after the test."""
    replaced = {name: mock.create_autospec(getattr(Init, name)) for name in NAMES}
    with mock.patch.multiple(Init, **replaced):
        yield replaced
        assert [getattr(Init, name) for name in NAMES] == list(replaced.values())


def gather_and_partition() -> list[Any]:
    """Gather a list, and partition it as unchanged and as written."""
    params = [SimpleNamespace(ds_id=0)]
    init = Init.__new__(Init)
    init._all_gather(params)
    init._ensure_availability_of_partitioned_params(params)
    init._partition(params)
    init._partition(params, has_been_updated=True)
    return params


def test_the_hooks_of_each_engine_are_called_until_they_are_removed(methods: dict[str, mock.Mock]) -> None:
    calls: list[Any] = []
    first, second = RecordedHooks("first", calls), RecordedHooks("second", calls)
    with ExitStack() as registered:
        registered.callback(partition_hooks.register(second))
        remove_first = partition_hooks.register(first)
        params = gather_and_partition()
        kinds = ("all_gather", "all_gather_coalesced", "write")
        assert calls == [(engine, kind, params) for kind in kinds for engine in ("second", "first")]
        remove_first()
        calls.clear()
        params = gather_and_partition()
        assert calls == [("second", kind, params) for kind in kinds]
    calls.clear()
    gather_and_partition()
    assert calls == []
    assert [method.call_count for method in methods.values()] == [3, 3, 6]


def test_the_hooks_of_an_engine_that_is_freed_without_its_end_are_not_called() -> None:
    calls: list[Any] = []
    remaining, freed = RecordedHooks("remaining", calls), RecordedHooks("freed", calls)
    remove = partition_hooks.register(remaining)
    partition_hooks.register(freed)
    del freed
    gc.collect()
    gather_and_partition()
    remove()
    assert {engine for engine, _, _ in calls} == {"remaining"}


def test_a_method_that_other_code_has_replaced_meanwhile_is_kept_and_the_hooks_are_called_once() -> None:
    calls: list[Any] = []
    remove = partition_hooks.register(RecordedHooks("first", calls))
    ours, others = Init._partition, mock.Mock()
    with mock.patch.object(Init, "_partition", others):
        remove()
        gather_and_partition()
        assert others.call_count == 2
        assert Init._partition is others
    assert Init._partition is ours
    assert calls == []
    second = RecordedHooks("second", calls)
    remove = partition_hooks.register(second)
    params = gather_and_partition()
    assert calls == [("second", kind, params) for kind in ("all_gather", "all_gather_coalesced", "write")]
    remove()
