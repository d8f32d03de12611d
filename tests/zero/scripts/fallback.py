"""Trains with stock, and with the plugin where our C++ kernel cannot be compiled; answers with what differs."""

from __future__ import annotations

import os
import tempfile
from unittest import mock

from deep_opt_states.device.kernels import library
from tests.launch import answer
from tests.zero.parity.arm import differences, run_arm
from tests.zero.parity.case import CPU, STREAMED, STRIDE_2, Case
from tests.zero.process_group import process_group

CASE = Case(name="fallback", blocks=(CPU, STREAMED, STRIDE_2), steps=4, clip=0.5)


def main() -> None:
    stock = run_arm(CASE, None)
    # DeepSpeed has loaded its op; whether it was compiled here or came prebuilt does not matter.
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, TORCH_EXTENSIONS_DIR=folder),
        mock.patch.object(library, "FLAGS", [*library.FLAGS, "-fno-such-flag"]),
    ):
        for block in CASE.blocks:
            ours = run_arm(CASE, block)
            answer({"block": block, "class": ours.optimizer_class, "differences": differences(stock, ours)})


if __name__ == "__main__":
    with process_group():
        main()
