"""List the arms: the model, the ways to train it, and the processes that train it, those that are wanted most first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.harness.setting import TrainingSetting
from benchmarks.harness.variants import NO_OFFLOAD, STOCK, SUPER, Variant, ours, planned, twin_flow
from perf_model.units import GB

OURS_EMPTY = ours("ours, empty block")

FSDP2 = "FSDP2, CPUOffloadPolicy"
TORCHAO = "torchao's CPUOffloadOptimizer, bf16 states, no clipping"
"""torchao copies each gradient to the host in backward, when the norm of all gradients is not known yet."""

SMALLER_SUB_GROUP = 100_000_000
"""Parameters of a sub-group for Twin-Flow, which updates whole ones on the GPU, and for SuperOffload."""


@dataclass(frozen=True, kw_only=True)
class Qwen3(TrainingSetting):
    """A Qwen3 of Hugging Face with tied embeddings. Ours and Twin-Flow may use ``gpu_memory_gb`` for the update."""

    context: int = 2048
    micro_batch: int = 1
    sub_group_size: int = 1_000_000_000
    intermediate: int
    heads: int
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 151_936
    gpu_memory_gb: float = 8.0

    def model(self, dtype: torch.dtype) -> Any:
        """Return the model on PyTorch's default device. It recomputes its activations."""
        config = Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            tie_word_embeddings=True,
            use_cache=False,
        )
        auto_model: Any = AutoModelForCausalLM  # without types
        model = auto_model.from_config(config, dtype=dtype)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model.train()

    @property
    def parameters(self) -> int:
        with torch.device("meta"):
            return sum(param.numel() for param in self.model(torch.bfloat16).parameters())

    @property
    def config(self) -> dict[str, Any]:
        """Return DeepSpeed's config with the sizes that Hugging Face's ``"auto"`` computes from the width."""
        zero = {
            "sub_group_size": self.sub_group_size,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": self.width**2,
            "stage3_prefetch_bucket_size": int(0.9 * self.width**2),
            "stage3_param_persistence_threshold": 10 * self.width,
        }
        return {**super().config, "zero_optimization": zero}

    @property
    def accelerator_bytes(self) -> int:
        return int(self.gpu_memory_gb * GB)

    def with_tokens(self, tokens: int) -> Qwen3:
        """Return this setting with the micro-batch that has ``tokens`` tokens."""
        return replace(self, micro_batch=tokens // self.context)


def ours_limited(setting: Qwen3) -> Variant:
    """Return the plugin with a limit of GPU memory."""
    return planned(f"ours, {setting.gpu_memory_gb:g} GB")


def with_bf16_states(variant: Variant) -> Variant:
    """Return the variant with master weights and moments in bf16. It is compared with stock's own bf16 states."""
    return replace(variant, name=f"{variant.name}, bf16 states", states="bf16")


MODELS = {
    "tiny": Qwen3(
        layers=3,
        width=64,
        intermediate=128,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocabulary=997,
        context=32,
        sub_group_size=40_000,
        gpu_memory_gb=0.001,
    ),
    "Qwen3-0.6B": Qwen3(layers=28, width=1024, intermediate=3072, heads=16, gpu_memory_gb=1.0),
    "Qwen3-1.7B": Qwen3(layers=28, width=2048, intermediate=6144, heads=16),
    "Qwen3-4B": Qwen3(layers=36, width=2560, intermediate=9728, heads=32),
}
"""The shapes by name. Their parameters are random."""


@dataclass(frozen=True, kw_only=True)
class ArmJob:
    """One process, or one per rank, that trains an arm with each number of ``tokens`` per step and rank in turn."""

    arm: str
    model: str
    tokens: Sequence[int]
    ranks: int = 1
    deterministic: bool = False
    """Whether it compares bits, and measures no time."""

    @property
    def setting(self) -> Qwen3:
        """Return the model with the first number of tokens."""
        setting = MODELS[self.model].with_tokens(self.tokens[0])
        smaller = self.arm in (SUPER.name, "Twin-Flow") and self.model != "tiny"
        return replace(setting, sub_group_size=SMALLER_SUB_GROUP) if smaller else setting

    @property
    def variant(self) -> Variant | None:
        """Return how DeepSpeed's engine is configured; None for an arm without it."""
        limited = ours_limited(self.setting)
        variants = [STOCK, NO_OFFLOAD, limited, OURS_EMPTY, SUPER, twin_flow(self.setting)]
        variants += map(with_bf16_states, (STOCK, limited))
        return next((variant for variant in variants if variant.name == self.arm), None)

    def waived_reason(self) -> str | None:
        """Return why the arm cannot run here, or None if it can."""
        if self.arm == TORCHAO and find_spec("torchao") is None:
            return "torchao is not installed"
        return None if self.variant is None else self.variant.waived_reason(self.setting)

    def labels(self, tokens: int) -> dict[str, Any]:
        """Return the fields that all rows of the arm with so many tokens share."""
        setting: dict[str, object] = {"model": self.model, "parameters": self.setting.parameters, "tokens": tokens}
        if self.deterministic:
            setting |= {"ranks": self.ranks, "algorithms": "deterministic only"}
        return {"variant": self.arm, "setting": setting}


def bits_jobs(model: str, tokens: int, ranks: int) -> list[ArmJob]:
    """Return the two jobs whose bits are compared, stock's first."""
    arms = (STOCK.name, ours_limited(MODELS[model]).name)
    return [ArmJob(arm=arm, model=model, tokens=(tokens,), ranks=ranks, deterministic=True) for arm in arms]


def timed_jobs(model: str, tokens: Sequence[int]) -> list[ArmJob]:
    """Return the jobs that measure times: first no offload and stock, which the others are compared with.

    Ours has a process per number of tokens, since it plans for the forward and backward of its first steps. Other
    systems train with the later numbers if time is left.
    """

    def job(arm: str, *tokens: int) -> ArmJob:
        return ArmJob(arm=arm, model=model, tokens=tokens)

    ours_with_limit = ours_limited(MODELS[model])
    limited = ours_with_limit.name
    first, *later = tokens
    bf16_states = (with_bf16_states(variant).name for variant in (STOCK, ours_with_limit))
    others = (*bf16_states, FSDP2, "Twin-Flow", SUPER.name, TORCHAO)
    return [
        job(NO_OFFLOAD.name, *tokens),
        job(STOCK.name, *tokens),
        job(limited, first),
        *(job(limited, number) for number in later),
        job(OURS_EMPTY.name, first),
        *(job(arm, first) for arm in others),
        *(job(arm, number) for number in later for arm in (OURS_EMPTY.name, *others)),
    ]
