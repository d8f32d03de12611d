"""Attributes of stock's optimizer that nobody sees while an update is under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Guarded:
    """``wait(optimizer)`` before the attribute is read: what it leads to may then be read, and written to."""

    def __init__(self, wait: Callable[[Any], None]) -> None:
        self._wait = wait

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, owner: type) -> Any:
        self._wait(optimizer)
        try:
            return vars(optimizer)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None

    def __set__(self, optimizer: Any, value: Any) -> None:
        vars(optimizer)[self._name] = value
