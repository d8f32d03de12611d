"""Machines and models that nobody measured: a grid to plan for, as wide as what people train on."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

from perf_model.prediction.cost import CostModel
from perf_model.prediction.hardware import HardwareProfile, Measurement, Provenance
from perf_model.prediction.memory import resident_bytes_of
from perf_model.presets.models import MODELS
from perf_model.schedule.workload import Workload
from perf_model.search.budgets import Budgets
from perf_model.search.planner import MAX_SLOTS
from perf_model.training_run.job import PARAM_BYTES
from perf_model.training_run.model import ModelShape, gpt

LINKS = {"PCIe 3": 15.75e9, "PCIe 4": 31.5e9, "PCIe 5": 63e9, "NVLink-C2C": 450e9}
"""Bytes a second each way, by specification, of the link of one GPU."""

GPU_MEMORY = {"PCIe 3": 0.9e12, "PCIe 4": 1.9e12, "PCIe 5": 3.3e12, "NVLink-C2C": 4.0e12}
"""Bytes a second, of a GPU of the link's time: V100, A100, H100, GH200."""

REACHED = 0.8
"""Of what is specified."""

DRAM_OF_A_CORE = 4e9
"""Bytes a second: servers have about as much for each core."""

ADAM_OF_A_CORE = 1e8
"""Parameters a second that a core updates out of its caches."""

JOINT = (1.3, 1.6, 1.9)
"""Both directions at once, over one alone."""

CORES = (8, 16, 32, 64, 128)
RANKS_PER_NODE = (1, 2, 4, 8)
RESIDENT = (0.0, 0.1, 0.3)
"""Share of the states that the GPU has room for, beside four slots for the longest parameter and all gradients."""

SHAPES: tuple[ModelShape, ...] = (
    gpt("1B", layers=24, hidden=1792, heads=14, vocab=50_304, positions=2048),
    gpt("3B", layers=32, hidden=2560, heads=32, vocab=50_304, positions=2048),
    MODELS["Llama-3-8B"],
    MODELS["13B"],
    gpt("30B", layers=48, hidden=7168, heads=56, vocab=50_304, positions=2048),
    MODELS["Llama-3-70B"],
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A node of ``ranks`` GPUs, which share its cores and its memory; ``resident`` is of ``RESIDENT``."""

    link: str
    joint: float
    cores: int
    ranks: int
    shape: ModelShape
    resident: float

    @property
    def cost(self) -> CostModel:
        dram = DRAM_OF_A_CORE * self.cores / self.ranks
        one_way = min(REACHED * LINKS[self.link], dram)
        # Bytes that an update moves: on the CPU in one pass and in stock's three, on the GPU p, m, v, g and 16 bit.
        rates = {
            "h2d_bytes_per_s": one_way,
            "d2h_bytes_per_s": one_way,
            "both_bytes_per_s": min(self.joint * REACHED * LINKS[self.link], dram),
            "copy_latency_s": 1e-5,
            "cpu_adam_params_per_s": min(dram / 28, ADAM_OF_A_CORE * self.cores / self.ranks),
            "stock_cpu_adam_params_per_s": min(dram / 42, ADAM_OF_A_CORE * self.cores / self.ranks),
            "dram_update_bytes_per_s": dram,
            "gpu_adam_params_per_s": REACHED * GPU_MEMORY[self.link] / 30,
        }
        return CostModel.of(
            HardwareProfile(
                name=self.link,
                provenance=Provenance(source="synthetic", ranks=self.ranks),
                measurements={name: Measurement(samples=(rate,)) for name, rate in rates.items()},
            )
        )

    def workload(self, sub_group_size: int) -> Workload:
        return Workload.of_parameters(self.shape.parameters(), self.ranks, sub_group_size)

    @property
    def budgets(self) -> Budgets:
        longest, *_ = sorted((-(-numel // self.ranks) for numel in self.shape.parameters()), reverse=True)
        numel = -(-self.shape.numel // self.ranks)
        # Room for all gradients, as without offloading; in blocks they take a little more.
        gradients_bytes = int(1.1 * PARAM_BYTES * numel) + 2**26
        states_bytes = MAX_SLOTS * resident_bytes_of(longest) + int(self.resident * resident_bytes_of(numel))
        return Budgets(gpu_bytes=gradients_bytes + states_bytes)

    def __str__(self) -> str:
        return (
            f"{self.shape.name}, {self.ranks} x {self.link} at {self.joint} both ways, {self.cores} cores, "
            f"room for {self.resident:.0%} of the states"
        )


def machines(count: int, seed: int) -> list[Machine]:
    """So many different ones of the grid, drawn by ``seed``."""
    grid = [
        Machine(link=link, joint=joint, cores=cores, ranks=ranks, shape=shape, resident=resident)
        for link, joint, cores, ranks, shape, resident in product(LINKS, JOINT, CORES, RANKS_PER_NODE, SHAPES, RESIDENT)
    ]
    return random.Random(seed).sample(grid, count)
