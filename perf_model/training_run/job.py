"""Define ``Job``, the parts of a training run that a plan depends on: memory without the optimizer, forward, backward.

All figures are per rank. Communication between GPUs is assumed to be hidden by the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from perf_model.prediction.hardware import HardwareProfile
from perf_model.prediction.memory import TrainingSetup
from perf_model.schedule.cutting import cut_into_units
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.rules import NO_RULES, PlacementRules
from perf_model.schedule.workload import Partition, Workload, form_sub_groups
from perf_model.training_run.model import ModelError, ModelShape, has_weight_decay, require_integer

PARAM_BYTES = 2
"""Bytes per parameter of a bf16 model."""

MAX_LIVE_PARAMETERS = 1_000_000_000
REDUCE_BUCKET_SIZE = 500_000_000
"""The most parameters that are gathered at a time, and per reduction bucket: DeepSpeed's defaults of
``stage3_max_live_parameters`` and ``reduce_bucket_size``."""

DEFAULT_SUB_GROUP_SIZE = 1_000_000_000
"""DeepSpeed's default of ``sub_group_size``, in parameters of one rank."""

MAX_TOKENS = 10**7
"""The most tokens per rank and step. Up to this limit, all numbers of bytes stay below 2^63 for every model."""

CUDA_CONTEXT_BYTES = 2**30
"""GPU memory that the driver, cuBLAS and NCCL take; an assumption."""


@dataclass(frozen=True, kw_only=True)
class GradientPath:
    """Bytes of gradients that one rank copies down to host memory and up again in one backward."""

    down: int = 0
    up: int = 0

    @classmethod
    def for_plan(cls, plan: UpdatePlan) -> GradientPath:
        """Return the bytes of our runtime.

        Gradients are copied down once if the CPU updates them, and stay on the accelerator if it updates them.
        """
        return cls(down=PARAM_BYTES * plan.numel(Placement.CPU))

    @classmethod
    def for_stock(cls, plan: UpdatePlan) -> GradientPath:
        """Return the bytes of stock DeepSpeed and Twin-Flow.

        Each gradient is copied down to the buffer that accumulates it, and up again (``stage3.py``,
        ``partition_grads``). If the states are in host memory, it is then copied down once more, in fp32. The residents
        of Twin-Flow have their states on the GPU.
        """
        numel = plan.workload.numel
        return cls(down=PARAM_BYTES * numel + 4 * (numel - plan.numel(Placement.RESIDENT)), up=PARAM_BYTES * numel)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run with ZeRO-3: each of ``world_size`` ranks trains ``micro_batch`` sequences per step.

    A sequence has ``sequence`` tokens. ``recompute``: activations are recomputed in backward.
    ``sub_group_size`` is that of DeepSpeed's config, in parameters of one rank, and ``rules`` are those of our block.
    Raise ``ModelError`` for an impossible number, and ``RulesError`` for a rule without effect on this model.
    """

    shape: ModelShape
    world_size: int
    ranks_per_node: int
    micro_batch: int
    sequence: int
    recompute: bool = True
    sub_group_size: int = DEFAULT_SUB_GROUP_SIZE
    rules: PlacementRules = NO_RULES

    def __post_init__(self) -> None:
        maxima = {
            "world_size": 10**6,
            "ranks_per_node": 10**4,
            "micro_batch": 10**6,
            "sequence": MAX_TOKENS,
            "sub_group_size": 10**15,
        }
        for key, limit in maxima.items():
            require_integer(key, getattr(self, key), 1, limit, f"Correct --{key.replace('_', '-')}.")
        if self.micro_batch * self.sequence > MAX_TOKENS:
            rule = (
                f"micro_batch: must be at most {MAX_TOKENS:,} tokens in all, with {self.sequence} tokens per sequence"
            )
            raise ModelError(f"{rule}, found {self.micro_batch}.\nCorrect --micro-batch or --sequence.")
        if self.world_size % self.ranks_on_node:
            raise ModelError(
                f"ranks_per_node: must divide the world size, {self.world_size}, found {self.ranks_per_node}.\n"
                f"Correct --ranks-per-node or --world-size."
            )
        self.rules.check([name for name, _ in self.shape.parameters()], aliases=self.shape.aliases)

    @cached_property
    def sub_groups(self) -> list[list[Partition]]:
        """Return one rank's partitions of the parameters, by DeepSpeed's sub-groups.

        As Hugging Face's Trainer does, norms and biases are in a param group of their own, without weight decay. A
        sub-group has parameters of one param group.
        """
        groups: dict[bool, list[Partition]] = {True: [], False: []}
        for partition in self._partitions:
            groups[has_weight_decay(partition.name)].append(partition)
        return [sub_group for group in groups.values() for sub_group in form_sub_groups(group, self.sub_group_size)]

    def workload(self, unit_size: int) -> Workload:
        """Return the units of one rank, of at most ``unit_size`` parameters each."""
        return cut_into_units(self.sub_groups, unit_size, self.rules.placement_of)

    @cached_property
    def setup(self) -> TrainingSetup:
        """Return the facts that the memory of the optimizer depends on besides the plan."""
        return TrainingSetup(longest_partition_numel=max(partition.numel for partition in self._partitions))

    @cached_property
    def _partitions(self) -> list[Partition]:
        return [Partition(name, -(-numel // self.world_size)) for name, numel in self.shape.parameters()]

    @property
    def ranks_on_node(self) -> int:
        """Return the number of ranks on each node."""
        return min(self.ranks_per_node, self.world_size)

    @property
    def tokens(self) -> int:
        """Return the tokens per step, over all ranks."""
        return self.world_size * self.micro_batch * self.sequence

    def forward_s(self, flops_per_s: float) -> float:
        """Return the seconds of forward."""
        return self.shape.forward_flops(self.micro_batch, self.sequence) / flops_per_s

    def backward_s(self, flops_per_s: float) -> float:
        """Return the seconds of backward, including recomputation, but not the copies of the gradients."""
        flops = self.shape.iteration_flops(self.micro_batch, self.sequence, self.recompute)
        return flops / flops_per_s - self.forward_s(flops_per_s)

    def gradients_s(self, path: GradientPath, profile: HardwareProfile) -> float:
        """Return the seconds of the copies of the gradients, which backward hides; 0 if a rate is waived."""
        d2h, h2d = map(profile.get, ("d2h_bytes_per_s", "h2d_bytes_per_s"))
        if d2h is None or h2d is None:
            return 0.0
        # DeepSpeed issues all of them on one stream, where they run one after another.
        return path.down / d2h + path.up / h2d

    def mfu(self, iteration_s: float, peak_flops: float) -> float:
        """Return the model FLOPs utilisation: forward and backward, without recomputation, over the GPU's peak."""
        return self.shape.iteration_flops(self.micro_batch, self.sequence, recompute=False) / (iteration_s * peak_flops)

    @property
    def gpu_bytes(self) -> int:
        """Return the peak of the GPU memory that training takes in addition to the optimizer."""
        numel = self.shape.numel
        partition_bytes = PARAM_BYTES * -(-numel // self.world_size)
        gathered_bytes = PARAM_BYTES * min(numel, MAX_LIVE_PARAMETERS) if self.world_size > 1 else 0
        bucket_bytes = PARAM_BYTES * min(numel, REDUCE_BUCKET_SIZE)
        return CUDA_CONTEXT_BYTES + partition_bytes + gathered_bytes + bucket_bytes + self.activation_bytes

    @property
    def activation_bytes(self) -> int:
        """Return the bytes of the 16-bit activations of a transformer (arXiv 2205.05198, section 4.1).

        A layer takes 34 bytes per token and hidden unit; attention scores are never stored. With recomputation, every
        layer takes 2 bytes, and one layer takes all 34. Logits are stored in 16 bits, and in fp32 with their gradient.
        """
        tokens = self.micro_batch * self.sequence
        layer_bytes = 34 * tokens * self.shape.hidden
        checkpoints_bytes = 2 * tokens * self.shape.hidden * self.shape.layers
        layers_bytes = layer_bytes + checkpoints_bytes if self.recompute else layer_bytes * self.shape.layers
        return layers_bytes + (2 + 4 + 4) * tokens * self.shape.vocab
