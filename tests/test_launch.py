"""The ports on which ranks meet."""

from __future__ import annotations

import random
import socket

import pytest

from tests.launch import free_port


def test_no_two_workers_have_a_port_in_common_nor_with_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "3")
    ports: list[set[int]] = []
    for worker in range(3):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{worker}")
        ports.append({free_port() for _ in range(50)})
    assert not ports[0] & ports[1] | ports[1] & ports[2] | ports[2] & ports[0]
    assert max(set().union(*ports)) < 32_768


def test_a_port_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(random.SystemRandom, "sample", lambda *_: [taken.getsockname()[1], free])
        assert free_port() == free
