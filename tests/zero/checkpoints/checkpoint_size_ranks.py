"""Answer with the bytes that a checkpoint of one model takes, saved by stock DeepSpeed and with each block."""

from __future__ import annotations

from typing import Any

from tests.launch import answer
from tests.zero.parity.case import CPU, STREAMED, Case
from tests.zero.parity.training import closing_engine, shared_folder, train
from tests.zero.process_group import process_group

CASE = Case(
    name="checkpoint", blocks=(CPU, STREAMED), widths=(200, 400, 600, 400, 200), sub_group_size=100_000, steps=2
)


def size_bytes(block: dict[str, Any] | None) -> int:
    """Train and save a checkpoint, and return its bytes."""
    with shared_folder() as folder, closing_engine(CASE, block) as engine:
        train(engine, CASE, folder)
        saved = folder / "saved"
        engine.save_checkpoint(str(saved))
        return sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())


if __name__ == "__main__":
    with process_group():
        answer([size_bytes(block) for block in (None, *CASE.blocks)])
