"""Test the seconds of collectives inside a node and across nodes, by hand and by properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.prediction.network import Network
from tests.model.profiles import RATES, profile

NETWORK = Network(
    ranks_per_node=8, all_gather_bytes_per_s=200e9, reduce_scatter_bytes_per_s=160e9, inter_node_bytes_per_s=10e9
)


def test_one_rank_communicates_nothing() -> None:
    assert NETWORK.all_gather_s(1e9, 1) == NETWORK.reduce_scatter_s(1e9, 1) == 0.0


def test_the_ranks_of_a_node_pass_on_all_parts_but_one() -> None:
    assert NETWORK.all_gather_s(8e9, 4) == pytest.approx(6e9 / 200e9)
    assert NETWORK.reduce_scatter_s(8e9, 4) == pytest.approx(6e9 / 160e9)


def test_the_ranks_of_a_node_share_what_crosses_nodes() -> None:
    # 15 of 16 parts leave each node, over the connections of 8 ranks.
    assert NETWORK.all_gather_s(16e9, 16) == NETWORK.reduce_scatter_s(16e9, 16) == pytest.approx(15e9 / 80e9)
    single = replace(NETWORK, ranks_per_node=1)
    assert single.all_gather_s(16e9, 16) == pytest.approx(15e9 / 10e9)


def test_the_slower_of_both_connections_determines_the_time() -> None:
    fast = replace(NETWORK, inter_node_bytes_per_s=100e9)
    assert fast.all_gather_s(16e9, 16) == pytest.approx(15e9 / 200e9)


def test_a_profile_without_rates_of_a_network_communicates_in_no_time() -> None:
    network = Network.from_profile(profile(), 8)
    assert network.all_gather_s(1e12, 64) == network.reduce_scatter_s(1e12, 64) == 0.0
    known = Network.from_profile(profile({**RATES, "all_gather_bytes_per_s": 1e9, "inter_node_bytes_per_s": None}), 8)
    assert known.all_gather_s(2e9, 2) == pytest.approx(1.0)
    assert known.reduce_scatter_s(2e9, 2) == 0.0


@given(st.integers(1, 10**4), st.integers(1, 16), st.floats(1e6, 1e13), st.floats(1, 10))
def test_a_faster_network_is_never_slower(ranks: int, ranks_per_node: int, rate: float, factor: float) -> None:
    slow = replace(NETWORK, ranks_per_node=ranks_per_node, inter_node_bytes_per_s=rate)
    fast = replace(slow, inter_node_bytes_per_s=rate * factor, all_gather_bytes_per_s=200e9 * factor)
    assert fast.all_gather_s(1e9, ranks) <= slow.all_gather_s(1e9, ranks)
