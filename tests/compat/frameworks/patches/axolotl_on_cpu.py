"""Let axolotl train on the CPU: it asks for NCCL by name, and has no option for the ``use_cpu`` of the Trainer."""

from typing import Any

import wrapt


@wrapt.when_imported("deepspeed.comm")
def use_gloo(module: Any) -> None:
    """Replace the backend that axolotl passes."""

    def init(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(**{**kwargs, "dist_backend": "gloo"})

    wrapt.wrap_function_wrapper(module, "init_distributed", init)


@wrapt.when_imported("accelerate.state")
def count_ranks(module: Any) -> None:
    """Let Accelerate connect the ranks for the CPU: axolotl asks it for GPUs, and each rank would be the only one."""

    def init(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(**{**kwargs, "cpu": True})

    wrapt.wrap_function_wrapper(module, "PartialState.__init__", init)


@wrapt.when_imported("peft")
def seed_adapters(module: Any) -> None:
    """Seed PyTorch before a LoRA is drawn at random: axolotl does not, so that two runs of stock differ."""

    def draw(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        import torch

        torch.manual_seed(11)
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(module, "get_peft_model", draw)


@wrapt.when_imported("transformers.training_args")
def use_cpu(module: Any) -> None:
    """Set ``use_cpu`` in all training arguments."""

    def post_init(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        instance.use_cpu = True
        wrapped()

    wrapt.wrap_function_wrapper(module, "TrainingArguments.__post_init__", post_init)


@wrapt.when_imported("axolotl.utils.environment")
def find_no_gpu(module: Any) -> None:
    """Let axolotl know that GPUs cannot copy to each other: with several ranks it asks CUDA, which raises an error."""
    module.check_cuda_p2p_support = lambda: False
