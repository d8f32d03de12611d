"""Check the fallback to DeepSpeed's op if the C++ kernel cannot be compiled: the log has the reason, the bits stay."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from io import StringIO
from unittest import mock

import pytest
import torch.distributed as dist

from deep_opt_states.device.kernels import library
from tests.ranks import ranks
from tests.zero.parity.case import CPU, STREAMED, STRIDE_2, Case
from tests.zero.parity.training import assert_same_bits, run_variant

CASE = Case(name="fallback", blocks=(CPU, STREAMED, STRIDE_2), steps=4, clip=0.5)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Make every compilation of the C++ kernel fail inside this context."""
    # DeepSpeed has loaded its own op already, so that the empty folder and the bad flag do not affect it.
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, TORCH_EXTENSIONS_DIR=folder),
        mock.patch.object(library, "FLAGS", [*library.FLAGS, "-fno-such-flag"]),
    ):
        yield


@pytest.mark.promise("P1", "P6")
# Not forked: the fork server has loaded the compiled kernel already.
@ranks(1, 2, fresh=True)
def test_the_fallback_gives_the_bits_of_stock_and_logs_its_reason() -> None:
    """Let the last rank fall back. The ranks must agree: otherwise they would call different collectives."""
    stock = run_variant(CASE, None)
    falls_back = dist.get_rank() == dist.get_world_size() - 1
    with redirect_stdout(StringIO()) as output, without_compiler() if falls_back else nullcontext():
        for block in CASE.blocks:
            ours = run_variant(CASE, block)
            assert ours.optimizer_class == "DeepOptimizerStates_Stage3"
            assert_same_bits(stock, ours)
            assert ours.deferred == 0, "the fallback cannot update ranges, so no update may be deferred"
    lines = output.getvalue().splitlines()
    if not falls_back:
        assert "fall back" not in output.getvalue()
        return
    starts = [number for number, line in enumerate(lines) if "The C++ Adam kernel cannot be compiled" in line]
    assert len(starts) == len(CASE.blocks), "once per engine"
    for start in starts:
        reason, remedy, fallback = lines[start : start + 3]
        assert "-fno-such-flag" in reason
        assert len(reason) < 500, "only the line of ninja's output that states the error"
        assert remedy.startswith("It needs a C++ compiler")
        assert fallback.startswith("Updates on the CPU fall back to DeepSpeedCPUAdam")
