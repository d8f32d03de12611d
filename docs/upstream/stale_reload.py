"""``reload_states`` restores old parameters after a pinned and then an unpinned offload. Runs on the software GPU.

``stage3.py`` uses ``lp_param_contiguous_pin_buffer`` whenever there was one.
"""

import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import Settings

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "stage3_param_persistence_threshold": 0,
    },
}

if __name__ == "__main__":
    with software_process_group(), plugged(Settings()):
        model = torch.nn.Linear(8, 1, bias=False)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
        inputs = torch.ones(1, 8, device=engine.device)
        for pinned in (True, False):
            engine.backward(engine(inputs).sum())
            engine.step()
            before = model.weight.ds_tensor.cpu()
            engine.offload_states(include=[OffloadStateTypeEnum.lp_params], pin_memory=pinned)
            engine.reload_states()
            changed = float((model.weight.ds_tensor.cpu() - before).abs().max())
            print(f"pin_memory {pinned}: reload_states has changed the weights by {changed:.1f}")
