"""Check the presets of models against the numbers of parameters that their authors state."""

from __future__ import annotations

import pytest

from perf_model.presets.models import MODELS

STATED = {
    "Llama-2-7B": 6_738_415_616,
    "Llama-3-8B": 8_030_261_248,
    "Llama-3-70B": 70_553_706_496,
    "Mistral-7B": 7_241_732_096,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Gemma-2-9B": 9_241_705_984,
}
"""The totals of the published safetensors files."""


@pytest.mark.parametrize("name", STATED)
def test_a_preset_has_the_parameters_of_the_published_model(name: str) -> None:
    assert MODELS[name].numel == STATED[name]


def test_only_the_experts_of_a_token_are_active() -> None:
    assert MODELS["Qwen3-30B-A3B"].active_numel == pytest.approx(3.35e9, rel=0.01)
    assert all(shape.active_numel == shape.numel for name, shape in MODELS.items() if name != "Qwen3-30B-A3B")
