"""Provide the fixture for tests that compile with Triton."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def compiled_anew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use an empty cache, since Triton would otherwise find the kernels of an earlier run in the home directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield
