"""Provide the fixture that starts the ranks of a module of tests."""

from tests.zero.conftest import trained, trained_by_selection

__all__ = ["trained", "trained_by_selection"]
