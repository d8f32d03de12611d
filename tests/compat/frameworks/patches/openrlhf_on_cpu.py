"""Let OpenRLHF train on the CPU, and add the block of the variable ``BLOCK`` to its config, which is no file.

It imports ``flash_attn``, which needs CUDA, and calls it only for packed samples. It calls ``torch.cuda`` directly.
"""

import json
import os
import sys
import types
from typing import Any

import wrapt

UNUSED = {
    "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
    "flash_attn.utils.distributed": ("all_gather",),
}
for name, functions in UNUSED.items():
    sys.modules[name] = module = types.ModuleType(name)
    vars(module).update(dict.fromkeys(functions))


@wrapt.when_imported("openrlhf")
def replace_cuda(module: Any) -> None:
    """Replace the functions of ``torch.cuda`` and the mesh that OpenRLHF uses."""
    import torch
    import torch.distributed.device_mesh

    torch.cuda.set_device = lambda device: None
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda device=None: None
    mesh = torch.distributed.device_mesh.init_device_mesh
    torch.distributed.device_mesh.init_device_mesh = lambda device_type, *args, **kwargs: mesh("cpu", *args, **kwargs)


@wrapt.when_imported("openrlhf.utils.deepspeed.deepspeed_utils")
def add_block(module: Any) -> None:
    """Add the block to the dictionary that ``get_train_ds_config`` returns."""
    stock = module.get_train_ds_config
    block = json.loads(os.environ["BLOCK"])
    module.get_train_ds_config = lambda *args, **kwargs: {**stock(*args, **kwargs), **block}
