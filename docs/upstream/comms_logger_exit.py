"""A collective that the enabled ``comms_logger`` does not know ends the process, with exit code 0."""

import atexit

import deepspeed
import torch

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "comms_logger": {"enabled": True},
}

if __name__ == "__main__":
    deepspeed.init_distributed()
    model = torch.nn.Linear(8, 1)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    atexit.register(print, "the process has ended inside all_gather_object, without an error", flush=True)
    deepspeed.comm.all_gather_object([None], "value")
    atexit.unregister(print)
    print("all_gather_object has returned")
