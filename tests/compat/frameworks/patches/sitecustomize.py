"""Let the frameworks train on the CPU, by the patches that ``CPU_PATCHES`` names.

Python imports this module when it starts, since the frameworks' own commands start the ranks.
"""

import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any


def wrap(module: str, name: str, wrapper: Callable[..., Any]) -> None:
    import wrapt

    wrapt.when_imported(module)(lambda imported: wrapt.wrap_function_wrapper(imported, name, wrapper))


def gloo() -> None:
    """Connect the ranks by Gloo before Accelerate looks for them: otherwise each rank is the only one on the CPU."""
    import wrapt

    def connect(_: object) -> None:
        import deepspeed

        deepspeed.init_distributed("gloo")

    if "RANK" in os.environ:
        wrapt.when_imported("accelerate")(connect)


def no_torchaudio() -> None:
    """Let LLaMA-Factory import a ``torchaudio`` that contains nothing: PyPI has no build for the PyTorch of the CPU."""
    sys.modules["torchaudio"] = module = types.ModuleType("torchaudio")
    module.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)


def openrlhf_on_cpu() -> None:
    """Replace ``torch.cuda`` for OpenRLHF, and add the block of the variable ``BLOCK`` to its config, which is no file.

    It imports ``flash_attn``, which needs CUDA, and calls it only for packed samples.
    """
    import wrapt

    padding = ("index_first_axis", "pad_input", "rearrange", "unpad_input")
    for name, functions in {"bert_padding": padding, "utils.distributed": ("all_gather",)}.items():
        sys.modules[f"flash_attn.{name}"] = module = types.ModuleType(f"flash_attn.{name}")
        vars(module).update(dict.fromkeys(functions))

    def replace_cuda(_: object) -> None:
        import torch
        import torch.distributed.device_mesh

        torch.cuda.set_device = lambda device: None
        torch.cuda.current_device = lambda: "cpu"
        torch.cuda.synchronize = lambda device=None: None
        mesh = torch.distributed.device_mesh.init_device_mesh
        torch.distributed.device_mesh.init_device_mesh = lambda _, *args, **kwargs: mesh("cpu", *args, **kwargs)

    def add_block(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return {**wrapped(*args, **kwargs), **json.loads(os.environ["BLOCK"])}

    wrapt.when_imported("openrlhf")(replace_cuda)
    wrap("openrlhf.utils.deepspeed.deepspeed_utils", "get_train_ds_config", add_block)


def axolotl_on_cpu() -> None:
    """Let axolotl train on the CPU: it asks for NCCL by name, and has no option for the ``use_cpu`` of the Trainer."""

    def use_gloo(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(**{**kwargs, "dist_backend": "gloo"})

    def count_ranks(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        # Axolotl asks Accelerate for GPUs, and each rank would be the only one.
        wrapped(**{**kwargs, "cpu": True})

    def seed_adapters(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        # A LoRA is drawn at random, and axolotl does not seed PyTorch before, so that two runs of stock differ.
        import torch

        torch.manual_seed(11)
        return wrapped(*args, **kwargs)

    def use_cpu(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        instance.use_cpu = True
        wrapped()

    wrap("deepspeed.comm", "init_distributed", use_gloo)
    wrap("accelerate.state", "PartialState.__init__", count_ranks)
    wrap("peft", "get_peft_model", seed_adapters)
    wrap("transformers.training_args", "TrainingArguments.__post_init__", use_cpu)
    # With several ranks, axolotl asks CUDA whether GPUs can copy to each other, which raises an error.
    wrap("axolotl.utils.environment", "check_cuda_p2p_support", lambda *_: False)


def different_characters() -> None:
    """Let ms-swift's GRPO reward a text by the number of its different characters, which differs in random texts."""
    import wrapt

    def add_reward(module: Any) -> None:
        def count(self: Any, completions: list[str], **_: Any) -> list[float]:
            return [float(len(set(text))) for text in completions]

        module.orms["different_characters"] = type("DifferentCharacters", (module.ORM,), {"__call__": count})

    wrapt.when_imported("swift.rewards")(add_reward)


PATCHES = {
    patch.__name__: patch for patch in (gloo, no_torchaudio, openrlhf_on_cpu, axolotl_on_cpu, different_characters)
}

for patch in os.environ.get("CPU_PATCHES", "").split():
    PATCHES[patch]()
