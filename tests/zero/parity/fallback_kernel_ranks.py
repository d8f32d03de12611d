"""Train with stock, and with the plugin while the C++ kernel cannot be compiled on the last rank.

Every rank prints one answer per config block: the differences, and the number of forwards with a deferred update.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch.distributed as dist

from deep_opt_states.device.kernels import library
from tests.launch import answer
from tests.zero.parity.case import CPU, STREAMED, STRIDE_2, Case
from tests.zero.parity.training import differences, run_variant
from tests.zero.process_group import process_group

CASE = Case(name="fallback", blocks=(CPU, STREAMED, STRIDE_2), steps=4, clip=0.5)


def main() -> None:
    stock = run_variant(CASE, None)
    last = dist.get_rank() == dist.get_world_size() - 1
    with without_compiler() if last else nullcontext():
        for block in CASE.blocks:
            ours = run_variant(CASE, block)
            answer(
                {
                    "block": block,
                    "class": ours.optimizer_class,
                    "differences": differences(stock, ours),
                    "deferred": ours.deferred,
                }
            )


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


if __name__ == "__main__":
    with process_group():
        main()
