"""Check that unsupported settings are refused at start, with the rule, the value found and the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from tests.zero.training_once import ProgramRanks, TrainingOnce, on_one_worker

NUMBERS = "Give Python numbers"

EXPECTED: dict[str, tuple[str, str]] = {
    "stage 0": ("zero_optimization.stage: must be 3, found 0", 'set "stage": 3'),
    "no zero_optimization": ("zero_optimization.stage: must be 3, found 0", 'set "stage": 3'),
    "stage 1": ("zero_optimization.stage: must be 3, found 1", 'set "stage": 3'),
    "stage 2": ("zero_optimization.stage: must be 3, found 2", 'set "stage": 3'),
    "no offload_optimizer": (
        'offload_optimizer.device: must be "cpu" or "nvme", found none',
        'Set "offload_optimizer"',
    ),
    "offload_optimizer none": (
        'offload_optimizer.device: must be "cpu" or "nvme", found none',
        'Set "offload_optimizer"',
    ),
    "nvme without a path": ('nvme_path: is needed with "device": "nvme", found nothing', "Set it to a folder"),
    "nvme without a folder": ("nvme_path: must be a folder, found none at /no/such/folder", "Create it"),
    "nvme in a folder of another user": ("nvme_path: must be writable by this user", "Name a folder of yours"),
    "nvme with fp32 moments of bf16 masters": ("bf16.bf16_optimizer_states: must be true with", "Set it, or use"),
    "host memory without nvme": ('host_memory_gb: belongs to "device": "nvme"', "Remove the key"),
    "nvme parameters": ('offload_param.device: must be "none" or "cpu", found nvme', 'set "device": "cpu"'),
    "ratio": ("offload_optimizer.ratio: must be 1", 'remove "ratio"'),
    "super_offload": ("offload_optimizer.super_offload: must be false, found True", 'remove "super_offload"'),
    "zenflow": ("zero_optimization.zenflow: must be absent, found topk_ratio=0.1", "Remove it"),
    "deepcompile": ("compile.deepcompile: must be false, found True", 'remove "deepcompile"'),
    "bf16 masters of an fp16 model": (
        'bf16.bf16_master_weights_and_grads: needs "enabled": true in the block "bf16", found True',
        "or remove the key",
    ),
    "fp16 master weights": ("fp16.fp16_master_weights_and_grads: must be false, found True", "remove it"),
    "fp16 autocast": ("torch_autocast.dtype: must not be float16, found torch.float16", "use bfloat16"),
    "muon": ('optimizer.type: must be "Adam" or "AdamW", or absent, found muon', '"type": "AdamW"'),
    "torch adam": ("optimizer: must be DeepSpeedCPUAdam", "pass deepspeed.ops.adam.DeepSpeedCPUAdam"),
    "sgd": (
        "found torch.optim.sgd.SGD.\nRemove",
        'Remove "zero_force_ds_cpu_optimizer": false, if the config contains it. Accelerate',
    ),
    "step hooks": ("optimizer (step hooks): must be none, found 1", "remove them"),
    "quantised gradients": ("zero_quantized_gradients: must be false, found True", "remove it"),
    "datastates": ("datastates_ckpt: must be absent, found {}", "decoupled writer saves in the background"),
    "deepspeed 0.17.5": ("must be version 0.17.6 or later", "pip install deepspeed==0.19.8"),
    "caller accumulates with 0.19.4": (
        "managed_gradient_accumulation: needs DeepSpeed 0.19.5 or later with ZeRO-3 and offloading, found 0.19.4",
        "or remove the key",
    ),
    "AutoTP with 0.18.5": ("tensor_parallel: needs DeepSpeed 0.19.4 or later", "or remove the key"),
    "AutoEP with 0.18.5": ("expert_parallel: needs DeepSpeed 0.19.3 or later", "or remove the key"),
    "method of a later release": (
        "engine.coalesce_grad_reduction() needs DeepSpeed 0.20.0 or later, found",
        "or remove the call",
    ),
    "another accelerator": ('must be "cuda" or "cpu", found \'xpu\'', '"enabled": false'),
    "streamed on a GPU": ("placement: streamed and resident units need a GPU Adam kernel", '"placement": "cpu"'),
    "stage 0, client optimizer": ("zero_optimization.stage: must be 3, found 0", 'set "stage": 3'),
    "no offload_optimizer, client optimizer": (
        'offload_optimizer.device: must be "cpu" or "nvme", found none',
        'Set "offload_optimizer"',
    ),
    "under zero.Init": ("offload_optimizer.ratio: must be 1", 'remove "ratio"'),
    "no optimizer, misspelled placement": (
        'placement: must be "planned"',
        'Did you mean [{"match": "*", "states": "resident"}]',
    ),
    "no learning rate": ("must be numbers, and betas two numbers, in every param group, found lr=None", NUMBERS),
    "learning rate in a tensor": ("found lr=tensor(0.0010) in param group 1", NUMBERS),
    "eps of adafactor": ("found eps=(1e-30, 0.001) in param group 1", 'choose "adamw_torch"'),
    "weight decay as a string": ("found weight_decay='0.1' in param group 1", NUMBERS),
    "three betas": ("found betas=(0.9, 0.99, 0.999) in param group 1", NUMBERS),
    "one beta": ("found betas=0.9 in param group 1", NUMBERS),
    "no beta": ("found betas=(None, 0.999) in param group 1", NUMBERS),
    "amsgrad": ("amsgrad and maximize must be false, found amsgrad=True in param group 1", "remove it"),
    "maximize": ("amsgrad and maximize must be false, found maximize=True in param group 1", "remove it"),
}

PLUGIN = "DeepOptimizerStates_Stage3"
ACCEPTED = {
    "numbers of other types": PLUGIN,
    "keys of PyTorch's AdamW": PLUGIN,
    "moments in the dtype of fp32 masters": PLUGIN,
    "bf16 master weights": PLUGIN,
    "bf16 optimizer states": PLUGIN,
    "no optimizer": "DeepSpeedZeRoOffload",
    "no optimizer, no offload": "DeepSpeedZeRoOffload",
    "no optimizer, stage 0": "BF16_Optimizer",
    "no optimizer, everything else refused": "DeepSpeedZeRoOffload",
}

REFUSED_WITH_THE_OPTIMIZER = {
    *("torch adam", "sgd", "another accelerator", "streamed on a GPU", "step hooks"),
    *("no learning rate", "learning rate in a tensor", "eps of adafactor", "weight decay as a string", "three betas"),
    *("one beta", "no beta", "amsgrad", "maximize"),
}
"""Attempts that are refused when DeepSpeed makes the optimizer: it has converted the model, but made no states yet."""

REFUSED_WHEN_CALLED = {"method of a later release"}


RANKS = ProgramRanks("tests.zero.start.refusal_ranks", timeout_s=120)
pytestmark = on_one_worker(RANKS.program)


RULES_WITHOUT_EFFECT = {
    "rules: matches nothing": "placement[0].match: must match a parameter of the model, found 'lm_heads.*'",
    "rules: shadowed": "placement[1].match: must match a parameter that no earlier rule matches",
    "rules: a regular expression": "placement[0].match: must match a parameter of the model, found",
    "rules: only frozen": "placement[0].match: must match a parameter that is trained",
}


@pytest.fixture
def answers(trained: TrainingOnce) -> dict[str, dict[str, str]]:
    (answers,) = trained.answers_by_name(1)
    others = {*RULES_WITHOUT_EFFECT, "rules: only for the optimized"}
    assert answers.keys() == EXPECTED.keys() | ACCEPTED.keys() | others
    return answers


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.promise("P6")
def test_an_unsupported_feature_is_refused_with_rule_value_and_remedy(
    name: str, answers: dict[str, dict[str, str]]
) -> None:
    rule, remedy = EXPECTED[name]
    answer = answers[name]
    assert answer["type"] in ("Unsupported", "ConfigError"), answer["message"]
    assert rule in answer["message"]
    assert "found" in answer["message"]
    assert remedy in answer["message"]


@pytest.mark.parametrize(
    "name", [name for name in EXPECTED if name not in REFUSED_WITH_THE_OPTIMIZER | REFUSED_WHEN_CALLED]
)
def test_an_unsupported_feature_is_refused_before_the_model_is_partitioned(
    name: str, answers: dict[str, dict[str, str]]
) -> None:
    assert answers[name]["untouched"]


@pytest.mark.parametrize("name", RULES_WITHOUT_EFFECT)
def test_a_rule_without_effect_is_refused_before_a_kernel_is_loaded(
    name: str, answers: dict[str, dict[str, Any]]
) -> None:
    assert RULES_WITHOUT_EFFECT[name] in answers[name]["error"]
    assert not answers[name]["partitioned"]


def test_rules_for_all_parameters_of_the_optimizer_accept_a_number_of_slots(answers: dict[str, dict[str, Any]]) -> None:
    """Check a model with a layer that requires gradients and is not given to the optimizer."""
    assert answers["rules: only for the optimized"]["type"] == "DeepOptimizerStates_Stage3"


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_supported_config_is_accepted(name: str, answers: dict[str, dict[str, str]]) -> None:
    answer = answers[name]
    assert answer["type"] == "accepted", answer["message"]
    assert answer["message"] == ACCEPTED[name]


def test_each_engine_without_an_optimizer_logs_one_line(trained: TrainingOnce) -> None:
    without = [name for name in ACCEPTED if name.startswith("no optimizer")]
    assert trained.finished(1)[0].output.count("an engine without an optimizer runs as stock DeepSpeed") == len(without)


@pytest.mark.promise("P6")
def test_a_refusal_on_one_rank_leaves_no_engine_and_no_thread_on_any(trained: TrainingOnce) -> None:
    for rank, answers in enumerate(trained.answers(2)):
        wrong_rule, refused, left, trained_afterwards = answers
        assert wrong_rule["type"] == ("RanksDisagree", "ConfigError")[rank]
        assert "placement[0].match: must match a parameter of the model" in wrong_rule["message"]
        assert refused["type"] == ("RanksDisagree", "Unsupported")[rank]
        assert "found lr=None in param group 1" in refused["message"]
        assert left == {"engines left": [], "threads left": 0}
        assert trained_afterwards == {"type": "accepted", "message": PLUGIN}
