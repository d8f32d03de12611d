"""Check ``"placement": "planned"``, the profile behind the plan, and the comparison of the prediction afterwards."""

from __future__ import annotations

import json
import re
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

from deep_opt_states.config import Config
from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.host.cores import CoreShare
from deep_opt_states.zero.start import planning
from deep_opt_states.zero.start.devices import AcceleratorChoice
from perf_model.prediction.hardware import REQUIRED, HardwareProfile
from perf_model.prediction.overlap_windows import Windows
from perf_model.schedule.action import ActionKind
from perf_model.schedule.cutting import cut_into_units
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Partition
from tests.model.costs import cost
from tests.model.profiles import RATES, profile
from tests.ranks import on_ranks
from tests.tiers import thorough

KINDS = {"cpu": {"CPU_STEP"}, "streamed": {"PREFETCH", "GPU_STEP", "FLUSH_STATES"}}


@dataclass(frozen=True)
class PlannedEngines:
    """The findings of a rank: an answer for each engine, and its log."""

    found: list[dict[str, Any]]
    output: str


def engines(world_size: int, cache: Path, *blocks: dict[str, Any]) -> list[PlannedEngines]:
    """Return the findings of each rank. Profiles are cached in ``cache``."""
    return on_ranks(world_size, train_each, blocks, XDG_CACHE_HOME=str(cache))


def train_each(blocks: tuple[dict[str, Any], ...]) -> PlannedEngines:
    """Create one engine per block, and train each for 5 steps. A block may be refused."""
    found: list[dict[str, Any]] = []
    with redirect_stdout(StringIO()) as output:
        for block in blocks:
            model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
            config: dict[str, Any] = {
                "train_micro_batch_size_per_gpu": 1,
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "cpu"},
                    "sub_group_size": 4000,
                    "stage3_param_persistence_threshold": 0,
                },
                "deep_optimizer_states": block,
            }
            try:
                engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
            except Exception as error:  # noqa: BLE001 (the test reads the message)
                found.append({"refused": f"{type(error).__name__}: {error}"})
                continue
            for _ in range(5):
                loss = engine(torch.ones(1, 64, dtype=torch.bfloat16)).float().square().mean()
                engine.backward(loss)
                engine.step()
            optimizer = engine.optimizer
            compared = optimizer.report.comparison()
            found.append(
                {
                    "placements": [placement.value for placement in optimizer.plan.placements],
                    "compared": {row.name: [row.predicted_s, row.measured_s] for row in compared},
                    "rank": dist.get_rank(),
                }
            )
            engine.destroy()
    return PlannedEngines(found, output.getvalue())


def test_a_quick_profile_is_measured_with_the_threads_and_cores_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[dict[str, Any]] = []

    def quick_profile(*arguments: Any, **options: Any) -> HardwareProfile:
        requested.append(options)
        return profile()

    monkeypatch.setattr(planning, "quick_profile", quick_profile)
    share = CoreShare(threads=2, cores=(3, 5), launch_cores=(0,), reason="")
    planning._load_profile(Config(), AcceleratorChoice(HostDevice(), slots_on_host=True), share, print)
    assert requested == [{"threads": 2, "cores": (3, 5)}]


@pytest.mark.parametrize(
    ("uses", "used_before_layer"),
    [(["embed", "layer", "head"], 1 / 3), (["embed", *["layer"] * 5, "head"], 1 / 7), (["layer", "embed", "head"], 0)],
)
def test_the_exposed_time_of_fixed_placements_is_predicted_from_the_uses_in_forward(
    uses: list[str], used_before_layer: float
) -> None:
    sub_groups = [[Partition("head", 10**6), Partition("layer", 10**6), Partition("embed", 10**6)]]
    workload = cut_into_units(sub_groups, 10**6)
    assert [unit.numel for unit in workload.units] == [10**6] * 3
    # The layer is updated last, so forward waits for it.
    plan = UpdatePlan(workload=workload, placements=(Placement.CPU,) * 3, num_slots=1, order=(0, 2, 1))
    windows = Windows(forward_s=1e-4)
    predicted = planning._predict(cost(), True, sub_groups, plan, uses, windows)
    (published_s,) = (
        span.end_s
        for span in predicted.timeline.spans
        if span.action.kind is ActionKind.PUBLISH and span.action.unit == 1
    )
    assert predicted.exposed_s == pytest.approx(published_s - 1e-4 * used_before_layer)
    in_order_of_units = planning._predict(cost(), True, sub_groups, plan, None, windows)
    assert in_order_of_units.exposed_s == pytest.approx(published_s - 1e-4 / 3)


@pytest.mark.parametrize("world_size", [thorough(1), 2])
@pytest.mark.promise("P5")
def test_without_a_profile_a_quick_one_is_measured_cached_and_shared(world_size: int, tmp_path: Path) -> None:
    first, *others = engines(world_size, tmp_path, {}, {"report": str(tmp_path / "run"), "placement": "streamed"})
    (cached,) = (tmp_path / "deep_opt_states").glob("*.json")
    measured = HardwareProfile.read(cached)
    assert measured.provenance.ranks == world_size
    assert first.output.count("A quick hardware profile was measured.") == 1
    assert first.output.count(str(cached)) == 1, "the second engine reads the profile of the first"
    for rank, finished in enumerate([first, *others]):
        planned, streamed = finished.found
        # The CPU accelerator has no separate memory through which states could be streamed.
        assert planned["placements"] == ["cpu"] * len(planned["placements"])
        assert planned["rank"] == rank
        assert set(streamed["placements"]) == {"streamed"}
        for found, kinds in ((planned, KINDS["cpu"]), (streamed, KINDS["streamed"])):
            assert set(found["compared"]) == {"update", "exposed", *kinds}
            for predicted_s, measured_s in found["compared"].values():
                assert predicted_s > 0
                assert measured_s > 0
        # Every rank predicts from rank 0's profile.
        for name, (predicted_s, *_) in planned["compared"].items():
            assert predicted_s == first.found[0]["compared"][name][0]
    assert first.output.count("5 updates, median of the last 3 against the prediction:\n  update ") == 2
    # The reason is logged at the start and at the end. The config of the second engine decides the placement itself.
    reason = "Nothing is streamed: the accelerator is the CPU, which has the states in its memory already."
    assert first.output.count(reason) == 2
    numel = 4 * (64 * 64 + 64) // world_size
    assert re.search(rf"\n  cpu: \d+ units?, {numel:,} parameters, .* of host memory", first.output)
    assert re.search(
        rf"\n  streamed: .* {numel:,} parameters, .* on the accelerator \d slots? of .*gradients", first.output
    )
    assert all("against the prediction" not in finished.output for finished in others)


def test_a_given_profile_is_used_as_rank_0_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    cpu_only = {name: rate for name, rate in RATES.items() if name.startswith(("cpu_adam_params", "stock", "dram"))}
    path.write_text(profile({**cpu_only, "cpu_adam_params_per_s": 1e9, "dram_copy_bytes_per_s": 4e9}).to_json())
    first, second = engines(2, tmp_path, {"profile": str(path)})
    assert first.output.count("measured with 1 rank per node at the same time, while 2 train") == 1
    assert "while 2 train" not in second.output
    for finished in (first, second):
        (found,) = finished.found
        # Adam takes 1 ns per parameter, and nothing is published.
        numel = 4 * (64 * 64 + 64) // 2
        assert found["compared"]["update"][0] == pytest.approx(numel / 1e9, rel=1e-6)
    assert not (tmp_path / "deep_opt_states").exists(), "nothing was measured"


def test_a_profile_measured_with_as_many_ranks_causes_no_warning(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(profile({name: rate for name, rate in RATES.items() if name in REQUIRED}).to_json())
    (alone,) = engines(1, tmp_path, {"profile": str(path)})
    assert "per node at the same time" not in alone.output


def test_a_profile_of_a_machine_with_a_gpu_is_refused_for_training_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(profile().to_json())
    for finished in engines(2, tmp_path, {"profile": str(path)}):
        (found,) = finished.found
        for expected in (
            "ProfileError: deep_optimizer_states.profile: must be of a machine like the one that trains",
            f"here on the CPU, found {path} of one with a GPU.",
            "Write one here with: deep-opt-states profile",
        ):
            assert expected in found["refused"]


def test_an_invalid_profile_is_refused_on_every_rank(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text(json.dumps({**json.loads(profile().to_json()), "version": 0}))
    missing = tmp_path / "missing.json"
    ranks = engines(2, tmp_path, {"profile": str(old)}, {"profile": str(missing)}, {"placement": "cpu"})
    refused_old, refused_missing, trained = ranks[0].found
    assert "ProfileError: version: must be the integer 2, found 0" in refused_old["refused"]
    assert "ProfileError: A profile must be a readable file" in refused_missing["refused"]
    assert "deep-opt-states profile --output profile.json" in refused_missing["refused"]
    assert trained["compared"] == {}, "a rule needs no profile if nothing is reported"
    for refused in ranks[1].found[:2]:
        assert "rank 0" in refused["refused"]
