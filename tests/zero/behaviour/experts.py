"""Run scenarios with AutoEP, which distributes the experts of a Hugging Face model over the ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_ep_presets import base as auto_ep_presets
from transformers import MixtralConfig, MixtralForCausalLM

from tests.zero.behaviour.behaviour_variant import BehaviourVariant, Seen, counters
from tests.zero.on_accelerator import on_accelerator
from tests.zero.parity.training import placements_by_name, real_numel

VOCABULARY = 61


def mixtral() -> torch.nn.Module:
    shape = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=32,
    )
    return MixtralForCausalLM(shape)


def do_nothing(*_: Any, **__: Any) -> None:
    """Replace AutoEP's hooks that record router logits, which fail with this version of transformers."""


def partitions(engine: Any) -> Seen:
    """Yield this rank's part of every sub-group, without the padding of partitions."""
    optimizer = engine.optimizer
    for sub_group, params in enumerate(optimizer.fp16_groups):
        master = optimizer.fp32_partitioned_groups_flat[sub_group]
        state = optimizer.state[master]
        yield "step", state["step"]
        offset = 0
        for param in params:
            real = real_numel(param)
            for tensor in (master.data, state["exp_avg"], state["exp_avg_sq"]):
                yield f"sub-group {sub_group} at {offset}", tensor[offset : offset + real].clone()
            yield f"parameter of sub-group {sub_group} at {offset}", param.ds_tensor.data.flatten()[:real].clone()
            offset += param.partition_numel()


RULES = {
    "placement": [{"match": "*.experts.*", "states": "streamed"}, {"match": "*.self_attn.*", "states": "cpu"}],
    "unit_size": 700,
}


def experts_with_rules_by_name(variant: BehaviourVariant) -> Seen:
    """Train with rules that place experts and attention; check that both are where the rules place them."""
    variant.replace_block(RULES)
    yield from experts_of_every_rank(variant)
    for optimizer in variant.optimizers:
        by_name = placements_by_name(optimizer)
        for part, expected in ((".experts.", "streamed"), (".self_attn.", "cpu")):
            assert {found.value for name, found in by_name.items() if part in name} == {expected}, by_name


def experts_of_every_rank(variant: BehaviourVariant) -> Seen:
    """Train with all experts on each rank, then with the experts divided among the ranks."""
    for size in (1, dist.get_world_size()):
        changes = {
            "expert_parallel": {
                "enabled": True,
                "autoep_size": size,
                "preset_model": "mixtral",
                "use_grouped_mm": False,
            },
            "gradient_clipping": 0.1,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"sub_group_size": 2000},
        }
        with deepspeed.zero.Init(config_dict_or_path=variant.config(**changes)):
            model = mixtral()
        # Transformers does not initialize the experts in this context.
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            for param in model.parameters():
                torch.nn.init.normal_(param.data, std=0.2)
        with mock.patch.object(auto_ep_presets, "_install_instance_transformers_output_recorders", do_nothing):
            engine = variant.engine(model, **changes)
        yield "sub-groups", len(engine.optimizer.fp16_groups)
        for step in range(6):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            tokens = on_accelerator(torch.randint(0, VOCABULARY, (2, 16), generator=generator))
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            yield "loss", loss.detach()
            yield from counters(engine)
        yield from partitions(engine)


SCENARIOS = (experts_of_every_rank, experts_with_rules_by_name)
