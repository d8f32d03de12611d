"""State the frameworks, their commands and the runs that are compared with stock, as values.

``{...}`` is replaced: ``{data}`` is the folder that ``tiny.py`` has filled, ``{config}`` the DeepSpeed config with or
without the block, ``{out}`` the folder for everything that is saved, ``{ranks}`` their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.compat.frameworks.published import AXOLOTL, LLAMA_FACTORY


@dataclass(frozen=True)
class Run:
    name: str
    command: str
    ranks: int = 1
    halfway: str = ""
    resume: str = ""
    yaml: str = ""


@dataclass(frozen=True)
class Framework:
    """A release of a framework, its patches for the CPU, and its runs.

    The first word of ``requirement`` is the release. It imports the other packages, and does not require them.
    ``config`` is the ZeRO-3 offload config that the project publishes, or its path in the package. ``pins`` is the
    framework's own requirement of DeepSpeed.
    """

    name: str
    requirement: str
    pins: str
    runs: tuple[Run, ...]
    patches: str = ""
    config: Mapping[str, Any] | str = field(default_factory=dict)


def _sft_and_dpo(sft: str, dpo: str, halfway: str, resume: str) -> tuple[Run, ...]:
    return (
        Run("SFT, 1 rank", sft, halfway=halfway, resume=resume),
        Run("SFT, 2 ranks", sft, ranks=2),
        Run("DPO with LoRA, 2 ranks", dpo, ranks=2),
    )


_TRAINER = (
    " --bf16 true --use_cpu true --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --learning_rate 1e-3"
    " --max_steps 6 --eval_steps 3 --save_steps 3 --save_total_limit 2 --load_best_model_at_end true --logging_steps 1"
    " --report_to none --seed 11 --ddp_backend gloo --deepspeed {config} --output_dir {out}"
)
"""Options with accumulation, evaluation and the best model; clipping and gradient checkpointing are on by default."""

_LLAMA_FACTORY = (
    "env FORCE_TORCHRUN=1 NPROC_PER_NODE={ranks} llamafactory-cli train --do_train true"
    " --model_name_or_path {data}/model --dataset_dir {data} --template empty --cutoff_len 128"
    " --val_size 0.1 --eval_strategy steps --save_strategy steps" + _TRAINER
)
_SWIFT = (
    "--model {data}/model --model_type qwen2 --template qwen2_5 --split_dataset_ratio 0.1 --torch_dtype bfloat16"
    " --attn_impl sdpa --max_length 512 --add_version false --gradient_checkpointing true" + _TRAINER
)
_OPENRLHF = (
    " --model.model_name_or_path {data}/model --data.max_len 128 --data.max_samples 32 --train.micro_batch_size 2"
    " --train.batch_size 8 --train.max_epochs 1 --ds.zero_stage 3 --ds.adam_offload --ds.attn_implementation sdpa"
    " --model.gradient_checkpointing_enable --adam.lr 1e-3 --eval.steps 2 --ckpt.output_dir {out}"
    " --ckpt.path {out}/ckpt --ckpt.save_steps 2"
)
_AXOLOTL = (
    "axolotl train {yaml} --launcher torchrun --output-dir {out} --deepspeed {config} -- --nproc_per_node={ranks}"
)
_AXOLOTL_YAML = """
base_model: {data}/model
dataset_prepared_path: {out}.prepared
val_set_size: 0.1
sequence_len: 512
sample_packing: false
micro_batch_size: 2
gradient_accumulation_steps: 2
max_steps: 6
num_epochs: 1
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 1e-3
bf16: true
gradient_checkpointing: true
attn_implementation: sdpa
eval_steps: 3
save_steps: 3
save_total_limit: 2
load_best_model_at_end: true
logging_steps: 1
seed: 11
special_tokens: {{pad_token: "<|endoftext|>"}}
ddp_backend: gloo
"""
_AXOLOTL_SFT = """
datasets: [{{path: {data}/alpaca.jsonl, ds_type: json, type: alpaca}}]
"""
_AXOLOTL_DPO = """
rl: dpo
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
datasets:
  - path: {data}/preferred.jsonl
    ds_type: json
    split: train
    type:
      field_prompt: instruction
      field_chosen: chosen
      field_rejected: rejected
      prompt_format: "{{prompt}}"
      chosen_format: "{{chosen}}"
      rejected_format: "{{rejected}}"
"""

FRAMEWORKS = (
    Framework(
        name="LLaMA-Factory",
        requirement="llamafactory==0.9.5",
        pins="`>=0.10.0,<=0.18.4` in `requirements/deepspeed.txt`, not checked when it runs",
        patches="no_torchaudio gloo",
        config=LLAMA_FACTORY,
        runs=_sft_and_dpo(
            f"{_LLAMA_FACTORY} --stage sft --finetuning_type full --dataset alpaca",
            f"{_LLAMA_FACTORY} --stage dpo --finetuning_type lora --lora_rank 8 --lora_target all --dataset preferred",
            halfway="checkpoint-3",
            resume="--resume_from_checkpoint {out}/checkpoint-3",
        ),
    ),
    Framework(
        name="ms-swift",
        requirement="ms-swift==4.6.0 msgspec",
        pins="nothing",
        patches="gloo different_characters",
        config="swift/config/zero3_offload.json",
        runs=(
            *_sft_and_dpo(
                f"env NPROC_PER_NODE={{ranks}} swift sft {_SWIFT} --tuner_type full --dataset {{data}}/chat.jsonl",
                f"env NPROC_PER_NODE={{ranks}} swift rlhf {_SWIFT} --rlhf_type dpo --tuner_type lora --lora_rank 8"
                " --target_modules all-linear --dataset {data}/rejected.jsonl",
                halfway="checkpoint-3",
                resume="--resume_from_checkpoint {out}/checkpoint-3",
            ),
            Run(
                "GRPO, 2 ranks",
                f"env NPROC_PER_NODE={{ranks}} swift rlhf {_SWIFT} --rlhf_type grpo --tuner_type full --use_vllm false"
                f" --dataset {{data}}/chat.jsonl --num_generations 2 --max_completion_length 16"
                " --reward_funcs different_characters",
                ranks=2,
            ),
        ),
    ),
    Framework(
        name="OpenRLHF",
        requirement="openrlhf==0.11.2",
        pins="`==0.19.6`",
        patches="openrlhf_on_cpu",
        runs=_sft_and_dpo(
            f"torchrun --nproc_per_node {{ranks}} -m openrlhf.cli.train_sft {_OPENRLHF}"
            " --data.dataset {data}/alpaca.jsonl --eval.dataset {data}/alpaca.jsonl"
            " --data.input_key instruction --data.output_key output",
            f"torchrun --nproc_per_node {{ranks}} -m openrlhf.cli.train_dpo {_OPENRLHF}"
            " --data.dataset {data}/both.jsonl --eval.dataset {data}/both.jsonl --data.apply_chat_template"
            " --eval.split train --ds.lora.rank 8"
            " --ds.lora.target_modules q_proj v_proj",
            halfway="ckpt/global_step2",
            resume="--ckpt.load_enable",
        ),
    ),
    Framework(
        name="axolotl",
        requirement="axolotl==0.19.0 triton",
        pins="`>=0.18.6,<0.19` in `axolotl[deepspeed]`",
        patches="axolotl_on_cpu gloo",
        # Its Accelerate keeps PyTorch's Adam because of this key, and the plugin refuses that.
        config={key: value for key, value in AXOLOTL.items() if key != "zero_force_ds_cpu_optimizer"},
        runs=(
            Run(
                "SFT, 1 rank",
                _AXOLOTL,
                halfway="checkpoint-3",
                resume="--resume-from-checkpoint {out}/checkpoint-3",
                yaml=_AXOLOTL_YAML + _AXOLOTL_SFT,
            ),
            Run("SFT, 2 ranks", _AXOLOTL, ranks=2, yaml=_AXOLOTL_YAML + _AXOLOTL_SFT),
            Run("DPO with LoRA, 2 ranks", _AXOLOTL, ranks=2, yaml=_AXOLOTL_YAML + _AXOLOTL_DPO),
        ),
    ),
)
