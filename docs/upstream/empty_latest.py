"""A job that is killed while DeepSpeed writes ``latest`` leaves it empty, and the next job finds no checkpoint."""

import os
import signal
import subprocess
import sys
import tempfile

import deepspeed
import torch
from deepspeed.runtime import engine as module_of_engine

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}


def open_and_die(path, mode="r"):
    file = open(path, mode)  # noqa: SIM115
    if os.path.basename(path) == "latest" and mode == "w" and os.path.exists(f"{os.path.dirname(path)}/step2"):
        os.kill(os.getpid(), signal.SIGKILL)
    return file


if __name__ == "__main__":
    is_child = "child" in sys.argv
    folder = sys.argv[-1] if is_child else tempfile.mkdtemp()
    if not is_child:
        subprocess.run([sys.executable, __file__, "child", folder])
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(8, 8), config=CONFIG)
    if is_child:
        module_of_engine.open = open_and_die
        engine.save_checkpoint(folder, tag="step1")
        engine.save_checkpoint(folder, tag="step2")
    try:
        engine.load_checkpoint(folder)
    except AssertionError:
        print(f"saved: {sorted(os.listdir(folder))}; AssertionError in load_checkpoint")
