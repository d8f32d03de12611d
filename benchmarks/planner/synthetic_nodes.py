"""Build a grid of synthetic nodes and models to plan for, which covers the range of hardware that people train on."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

from perf_model.prediction.cost import WHOLE_GPU_STEP_BYTES, CostModel
from perf_model.prediction.hardware import HardwareProfile, Measurement, Provenance
from perf_model.prediction.memory import SIXTEEN_BIT, TrainingSetup, resident_bytes_of
from perf_model.presets.models import MODELS
from perf_model.schedule.cutting import cut_into_units
from perf_model.schedule.workload import Partition, Workload, form_sub_groups
from perf_model.search.budgets import Budgets
from perf_model.search.starting_points import MAX_SLOTS
from perf_model.training_run.families.decoder import gpt
from perf_model.training_run.job import DEFAULT_SUB_GROUP_SIZE
from perf_model.training_run.model import ModelShape
from perf_model.training_run.training_memory import PARAM_BYTES

LINKS = {"PCIe 3": 15.75e9, "PCIe 4": 31.5e9, "PCIe 5": 63e9, "NVLink-C2C": 450e9}
"""Specified bytes per second of one GPU's link, in each direction."""

GPU_MEMORY = {"PCIe 3": 0.9e12, "PCIe 4": 1.9e12, "PCIe 5": 3.3e12, "NVLink-C2C": 4.0e12}
"""Bytes per second of the memory of a GPU of the link's generation: V100, A100, H100, GH200."""

REACHED = 0.8
"""Share of a specified bandwidth that can be reached."""

DRAM_BYTES_PER_S_PER_CORE = 4e9
"""Host memory bandwidth per core, which is about the same in all servers."""

ADAM_PARAMS_PER_S_PER_CORE = 1e8
"""Parameters per second that one core updates in its caches."""

JOINT = (1.3, 1.6, 1.9)
"""Bandwidth of both directions at once, relative to one direction alone."""

CORES = (8, 16, 32, 64, 128)
RANKS_PER_NODE = (1, 2, 4, 8)
RESIDENT = (0.0, 0.1, 0.3)
"""Shares of the states that fit into GPU memory next to four slots for the longest parameter and all gradients."""

SHAPES: tuple[ModelShape, ...] = (
    gpt("1B", layers=24, hidden=1792, heads=14, vocab=50_304, positions=2048),
    gpt("3B", layers=32, hidden=2560, heads=32, vocab=50_304, positions=2048),
    MODELS["Llama-3-8B"],
    MODELS["13B"],
    gpt("30B", layers=48, hidden=7168, heads=56, vocab=50_304, positions=2048),
    MODELS["Llama-3-70B"],
)


@dataclass(frozen=True, kw_only=True)
class SyntheticNode:
    """A node of ``ranks`` GPUs, which share its cores and its memory. ``resident`` is one of ``RESIDENT``."""

    link: str
    joint: float
    cores: int
    ranks: int
    shape: ModelShape
    resident: float

    @property
    def cost(self) -> CostModel:
        """Return the cost model of one rank."""
        dram = DRAM_BYTES_PER_S_PER_CORE * self.cores / self.ranks
        one_way = min(REACHED * LINKS[self.link], dram)
        # An update moves 28 bytes per parameter on the CPU in one pass and 42 in stock's three passes. On the GPU it
        # moves as many: p, m and v in both directions, the 16-bit gradient and the 16-bit parameter.
        rates = {
            "h2d_bytes_per_s": one_way,
            "d2h_bytes_per_s": one_way,
            "both_bytes_per_s": min(self.joint * REACHED * LINKS[self.link], dram),
            "copy_latency_s": 1e-5,
            "cpu_adam_params_per_s": min(dram / 28, ADAM_PARAMS_PER_S_PER_CORE * self.cores / self.ranks),
            "stock_cpu_adam_params_per_s": min(dram / 42, ADAM_PARAMS_PER_S_PER_CORE * self.cores / self.ranks),
            "dram_update_bytes_per_s": dram,
            "gpu_adam_params_per_s": REACHED * GPU_MEMORY[self.link] / WHOLE_GPU_STEP_BYTES,
        }
        return CostModel.from_profile(
            HardwareProfile(
                name=self.link,
                provenance=Provenance(source="synthetic", ranks=self.ranks),
                measurements={name: Measurement(samples=(rate,)) for name, rate in rates.items()},
            )
        )

    def workload(self, unit_size: int) -> Workload:
        """Return the units of one rank, with DeepSpeed's default of ``sub_group_size``."""
        partitions = [Partition(name, -(-numel // self.ranks)) for name, numel in self.shape.parameters()]
        return cut_into_units(form_sub_groups(partitions, DEFAULT_SUB_GROUP_SIZE), unit_size)

    @property
    def setup(self) -> TrainingSetup:
        """Return a setup in which gradients are accumulated, so that all of them stay on the GPU."""
        return TrainingSetup(accumulates=True)

    @property
    def budgets(self) -> Budgets:
        """Return the GPU memory that the updates of one rank may use."""
        longest, *_ = sorted((-(-numel // self.ranks) for _, numel in self.shape.parameters()), reverse=True)
        numel = -(-self.shape.numel // self.ranks)
        # All gradients stay on the GPU, as they do without offloading. In blocks they take a little more memory.
        gradients_bytes = int(1.1 * PARAM_BYTES * numel) + 2**26
        states_bytes = MAX_SLOTS * resident_bytes_of(longest, SIXTEEN_BIT) + int(
            self.resident * resident_bytes_of(numel, SIXTEEN_BIT)
        )
        return Budgets(gpu_bytes=gradients_bytes + states_bytes)

    def __str__(self) -> str:
        return (
            f"{self.shape.name}, {self.ranks} x {self.link}, both directions at {self.joint} times one, "
            f"{self.cores} cores, GPU memory for {self.resident:.0%} of the states"
        )


def draw_nodes(count: int, seed: int) -> list[SyntheticNode]:
    """Return ``count`` different nodes of the grid, drawn with ``seed``."""
    grid = [
        SyntheticNode(link=link, joint=joint, cores=cores, ranks=ranks, shape=shape, resident=resident)
        for link, joint, cores, ranks, shape, resident in product(LINKS, JOINT, CORES, RANKS_PER_NODE, SHAPES, RESIDENT)
    ]
    return random.Random(seed).sample(grid, count)
