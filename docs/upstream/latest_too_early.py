"""The file ``latest`` of the decoupled writer names a checkpoint before all ranks have written their files."""

import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import deepspeed
import torch

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "checkpoint": {"writer": {"type": "python", "decoupled": True}},
}


def watch(folder, writer):
    while not (folder / "latest").exists() or (folder / "latest").read_text() != "step2":
        time.sleep(0.1)
    print("latest names step2, whose files are:", sorted(path.name for path in folder.glob("step2/*optim_states.pt")))
    os.kill(writer.pid, signal.SIGCONT)


if __name__ == "__main__":
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(8, 8), config=CONFIG)
    folders = [tempfile.mkdtemp() if engine.global_rank == 0 else None]
    torch.distributed.broadcast_object_list(folders)
    folder = Path(folders[0])
    for tag in ("step1", "step2", "step3"):
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()  # commits the checkpoint of the step before
        if engine.global_rank == 1 and tag == "step2":  # The writer of rank 1 is slow.
            os.kill(engine.checkpoint_engine.ckpt_process.pid, signal.SIGSTOP)
            threading.Thread(target=watch, args=(folder, engine.checkpoint_engine.ckpt_process)).start()
        engine.save_checkpoint(folder, tag=tag)
    engine.checkpoint_engine.cleanup()
