"""Run the body of a test on ranks: ``@ranks(2)`` starts two processes, in which the body runs in a process group.

Each rank imports the module of the test, with pytest's assertion messages, and calls the body with the parameters of
the test, which must be picklable. ``tmp_path`` is the same folder on all ranks.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.launch import Finished, run_ranks
from tests.zero.process_group import end_process, process_group

Group = Callable[[], AbstractContextManager[object]]

OUTPUT_CHARACTERS = 5000


def ranks(*world_sizes: Any, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that runs the body of a test on ranks; with several ``world_sizes``, one test for each."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(world_size: int = world_sizes[0], **arguments: Any) -> None:
            on_ranks(world_size, functools.partial(body, **arguments), **options)

        test.body = body  # type: ignore[attr-defined]
        if len(world_sizes) == 1 and isinstance(world_sizes[0], int):
            return test
        signature = inspect.signature(body)
        parameter = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = signature.replace(parameters=[*signature.parameters.values(), parameter])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world_size", world_sizes)(test)

    return decorate


def on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    """Call ``function`` on each rank, and return the results; fail the test with the outputs of ranks that fail."""
    finished, values = ended_ranks(world_size, function, *arguments, **options)
    failed = [
        f"rank {rank} of {world_size} ended with {process.returncode}:\n{process.output[-OUTPUT_CHARACTERS:]}"
        for rank, process in enumerate(finished)
        if process.returncode != 0
    ]
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)
    assert len(values) == world_size, "a rank ended with 0 before the end of its body"
    return values


def ended_ranks(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 300,
    fresh: bool = False,
    group: Group = process_group,
    **environment: str,
) -> tuple[list[Finished], list[Any]]:
    """Call ``function`` on each rank, and return how the ranks ended, and the results of those that did not fail."""
    call = functools.partial(function, *arguments)
    # A body has the name of its test.
    request = (call.func.__module__, call.func.__qualname__, call.args, call.keywords, group)
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "call").write_bytes(pickle.dumps(request))
        finished = run_ranks(world_size, ["-m", "tests.ranks", name], timeout_s, fresh=fresh, **environment)
        paths = (folder / f"value {rank}" for rank in range(world_size))
        return finished, [pickle.loads(path.read_bytes()) for path in paths if path.exists()]


def once(start: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``start`` with its results kept, for tests that share ranks; also a failure is kept, and raised again."""
    kept: dict[tuple[Any, ...], tuple[Any, BaseException | None]] = {}

    @functools.wraps(start)
    def started(*arguments: Any) -> Any:
        if arguments not in kept:
            try:
                kept[arguments] = start(*arguments), None
            except BaseException as failure:  # noqa: BLE001 (every test that shares the ranks raises it)
                kept[arguments] = None, failure
        result, failure = kept[arguments]
        if failure is not None:
            raise failure
        return result

    return started


def explain_assertions() -> None:
    """Rewrite the assertions of modules of tests that are imported from now on, as pytest does in its own process."""
    from _pytest.assertion import install_importhook, util
    from _pytest.config import get_config

    config = get_config()
    config.option.verbose = 1
    install_importhook(config)
    # With it, the messages contain more of the values.
    util._config = config


def main(folder: Path) -> None:
    explain_assertions()
    module, name, arguments, keywords, group = pickle.loads((folder / "call").read_bytes())
    function = getattr(importlib.import_module(module), name)
    with group():
        value = getattr(function, "body", function)(*arguments, **keywords)
        (folder / f"value {os.environ['RANK']}").write_bytes(pickle.dumps(value))
    end_process()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
