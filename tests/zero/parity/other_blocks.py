"""List the blocks of DeepSpeed's config that watch a training run, or that change it elsewhere than in the update.

Their files are written to the current folder.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

MONITORS: Json = {
    "tensorboard": {"enabled": True, "output_path": "tensorboard"},
    "csv_monitor": {"enabled": True, "output_path": "csv"},
    "wandb": {"enabled": True},
}
FLOPS_PROFILER: Json = {"enabled": True, "profile_step": 2, "detailed": True, "output_file": "flops.txt"}

_CURRICULUM: Json = {
    "enabled": True,
    "data_cluster_path": "clusters",
    "curriculum_metrics": {
        "width": {
            "difficulty_type": "value",
            "clustering_type": "single_cluster",
            "min_difficulty": 1,
            "max_difficulty": 4,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 1},
        }
    },
}
# Every layer keeps all of its four tokens: DeepSpeed's kernels that drop tokens exist for CUDA only.
_RANDOM_LTD: Json = {
    "enabled": True,
    "total_layer_num": 4,
    "random_ltd_layer_num": 2,
    "random_ltd_layer_id": [1, 2],
    "model_mask_name": None,
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {
        "min_value": 4,
        "max_value": 4,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 2, "seq_per_step": 1},
    },
    "layer_token_lr_schedule": {"enabled": False, "total_layer_tokens": 10, "warmup_type": "linear"},
}

TRAINED: dict[str, Json] = {
    "comms_logger": {"comms_logger": {"enabled": True}},
    # DeepSpeed enables the logger if there is a block at all.
    "comms_logger, enabled: false": {"comms_logger": {"enabled": False}},
    "comms_logger, verbose, debug": {"comms_logger": {"enabled": True, "verbose": True, "debug": True}},
    "comms_logger, some operations": {
        "comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_gather_object", "all_reduce", "barrier"]}
    },
    "comms_logger, fp16": {"comms_logger": {"enabled": True}, "fp16": {"enabled": True, "initial_scale_power": 10}},
    "flops_profiler": {"flops_profiler": FLOPS_PROFILER},
    "wall_clock_breakdown": {"wall_clock_breakdown": True},
    "memory_breakdown": {"memory_breakdown": True},
    "dump_state": {"dump_state": True},
    "monitors": MONITORS,
    "checkpoint": {"checkpoint": {"tag_validation": "Fail", "parallel_write": {"pipeline_stage": True}}},
    "checkpoint, node-local": {"checkpoint": {"tag_validation": "Ignore", "use_node_local_storage": True}},
    "zero_allow_untested_optimizer": {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False},
    "aio": {"aio": {"block_size": 2**20, "queue_depth": 8, "intra_op_parallelism": 1, "overlap_events": True}},
    "activation_checkpointing": {"activation_checkpointing": {"partition_activations": True, "profile": True}},
    "communication_data_type": {"communication_data_type": "fp32"},
    "disable_python_gc": {"disable_python_gc": True, "disable_allgather": True, "log_level": "info"},
    "dataloader_drop_last": {"dataloader_drop_last": True},
    "data_efficiency, curriculum": {
        "data_efficiency": {
            "enabled": True,
            "seed": 7,
            "data_sampling": {"enabled": True, "num_workers": 0, "curriculum_learning": _CURRICULUM},
        }
    },
    "data_efficiency, random_ltd": {
        "data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": _RANDOM_LTD}}
    },
    "everything that watches": {
        "comms_logger": {"enabled": True, "verbose": True, "debug": True},
        "flops_profiler": FLOPS_PROFILER,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "dump_state": True,
        **MONITORS,
    },
}
"""Parts of a config with which stock trains, by name."""

EXITS: dict[str, Json] = {
    "autotuning, metrics": {
        "autotuning": {"enabled": True, "start_profile_step": 2, "end_profile_step": 3, "metric_path": "metric.json"}
    },
    "autotuning, model": {
        "autotuning": {"enabled": True, "model_info": {"profile": True}, "model_info_path": "model.json"}
    },
}
"""Parts with which DeepSpeed ends the process after it has written the files that the autotuner reads."""

REFUSED: dict[str, tuple[Json, str]] = {
    "elasticity": ({"elasticity": {"enabled": True}}, "Elastic training has been removed"),
    "eigenvalue": ({"eigenvalue": {"enabled": True}}, "'eigenvalue' configuration block is no longer supported"),
    "progressive_layer_drop": ({"progressive_layer_drop": {"enabled": True}}, "Layer Dropping has been removed"),
    "curriculum_learning": ({"curriculum_learning": {"enabled": True}}, "'curriculum_learning' has been removed"),
    "gradient_predivide_factor": ({"gradient_predivide_factor": 2.0}, "not yet supported with ZeRO-3"),
    "gradient_allreduce_op": ({"gradient_allreduce_op": "sum"}, "is not supported with ZeRO stage 3"),
}
"""Parts that stock refuses, each with a part of its error."""
