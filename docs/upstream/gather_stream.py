"""ZeRO-3 gathers a parameter without waiting for a script's write to it. Runs on the software GPU of the tests."""

import sys
from pathlib import Path

import deepspeed
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import Settings

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.0}},
    "timers": {"throughput": {"enabled": False}},  # It would synchronize the device in each step.
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "stage3_param_persistence_threshold": 0,
    },
}

if __name__ == "__main__":
    with software_process_group(), plugged(Settings()):
        model = torch.nn.Linear(8, 8, bias=False)
        torch.nn.init.zeros_(model.weight)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
        inputs = torch.ones(1, 8, device=engine.device)
        for _ in range(3):  # Later forwards do not exchange the trace of the modules, which synchronizes.
            engine.backward(engine(inputs).sum())
            engine.step()
        busy = torch.ones(2000, 2000, device=engine.device)
        with torch.no_grad():
            for _ in range(5):
                busy @ busy  # The write waits for these kernels on the current stream.
            model.weight.ds_tensor.fill_(1.0)
        output = engine(inputs).detach()
        print(f"every weight is 1.0, so every output is 8.0; the largest is {float(output.max()):.1f}")
