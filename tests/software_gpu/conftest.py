"""Provide the fixture that starts the ranks of a module of tests."""

from tests.zero.conftest import trained

__all__ = ["trained"]
