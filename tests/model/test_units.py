"""Test how quantities are formatted for people: with so many digits, and never with an exponent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.units import gigabytes_per_second, params_per_second, size, size_of


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (size(120_000, 2), "120 kB"),
        (size(999_400, 2), "1.0 MB"),
        (size(0), "0 kB"),
        (gigabytes_per_second(1.5e12), "1,500 GB/s"),
        (gigabytes_per_second(25e9), "25 GB/s"),
        (gigabytes_per_second(1.234e9), "1.23 GB/s"),
        (params_per_second(1.5e12), "1,500 B params/s"),
        (params_per_second(25e6), "25 M params/s"),
        (size_of(76e9, 85.52e9), "76 GB of 85.5 GB"),
        (size_of(85.52e9, 85.52e9), "85.5 GB of 85.5 GB"),
        (size_of(85.51e9, 85.52e9), "85.51 GB of 85.52 GB"),
        (size_of(76e9, None), "76 GB (limit unknown)"),
    ],
)
def test_a_quantity_is_formatted_with_its_digits(shown: str, expected: str) -> None:
    assert shown == expected


@given(st.floats(1e5, 1e14), st.integers(1, 4))
def test_no_quantity_of_a_machine_is_formatted_with_an_exponent(value: float, digits: int) -> None:
    for shown in (size(value, digits), gigabytes_per_second(value), params_per_second(value)):
        number, *_ = shown.split()
        assert set(number) <= set("0123456789.,")
