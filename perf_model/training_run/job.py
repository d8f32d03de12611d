"""Define ``Job``, the parts of a training run that a plan depends on: memory without the optimizer, forward, backward.

All figures are per rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from perf_model.prediction.hardware import HardwareProfile
from perf_model.prediction.memory import DEFAULT_SETUP, TrainingSetup
from perf_model.schedule.cutting import cut_into_units
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.rules import NO_RULES, PlacementRules
from perf_model.schedule.workload import Partition, Workload, form_sub_groups
from perf_model.training_run.activations import SCORE_BYTES, Activations
from perf_model.training_run.micro_batch import FORWARD_ALL_REDUCES, MicroBatch
from perf_model.training_run.model import ModelError, ModelShape, has_weight_decay, require_integer
from perf_model.training_run.shards import shard_numel
from perf_model.training_run.training_memory import PARAM_BYTES, TrainingMemory, trained_numel

DEFAULT_SUB_GROUP_SIZE = 1_000_000_000
"""DeepSpeed's default of ``sub_group_size``, in parameters of one rank."""

MAX_REUSE_DISTANCE = 1_000_000_000
"""DeepSpeed's default of ``stage3_max_reuse_distance``, in parameters: one that is used again after fewer others is not
released."""

MAX_TOKENS = 10**7
"""The most tokens per rank and micro-batch. Up to this limit, all numbers of bytes stay below 2^63 for every model."""


@dataclass(frozen=True, kw_only=True)
class GradientPath:
    """Bytes of gradients that one rank copies down to host memory and up again in the last backward before an update.

    ``accumulated_down_bytes`` and ``accumulated_up_bytes`` are those of each earlier backward whose gradients are
    accumulated.
    """

    down_bytes: int = 0
    up_bytes: int = 0
    accumulated_down_bytes: int = 0
    accumulated_up_bytes: int = 0

    def seconds(self, profile: HardwareProfile) -> tuple[float, float]:
        """Return the seconds of the copies in the last backward and in each earlier one; 0 if a rate is waived."""
        d2h, h2d = map(profile.get, ("d2h_bytes_per_s", "h2d_bytes_per_s"))
        if d2h is None or h2d is None:
            return 0.0, 0.0
        # DeepSpeed issues all of them on one stream, where they run one after another.
        return (
            self.down_bytes / d2h + self.up_bytes / h2d,
            self.accumulated_down_bytes / d2h + self.accumulated_up_bytes / h2d,
        )

    @classmethod
    def for_plan(cls, plan: UpdatePlan, setup: TrainingSetup = DEFAULT_SETUP) -> GradientPath:
        """Return the bytes of our runtime.

        Gradients stay on the accelerator if it updates them, and are copied down once if the CPU does. If the sums over
        micro-batches are not on the accelerator (``TrainingSetup.keeps_sums``), each micro-batch copies those of the
        CPU's units down, and each but the first copies them up before. Of these equal copies, it is the last
        micro-batch that is counted without the copy up, and not the first.
        """
        down_bytes = PARAM_BYTES * plan.numel(Placement.CPU)
        on_accelerator = any(placement is not Placement.CPU for placement in plan.placements)
        if not setup.accumulates or setup.keeps_sums(updates_on_accelerator=on_accelerator):
            return cls(down_bytes=down_bytes)
        return cls(down_bytes=down_bytes, accumulated_down_bytes=down_bytes, accumulated_up_bytes=down_bytes)

    @classmethod
    def for_stock(cls, plan: UpdatePlan) -> GradientPath:
        """Return the bytes of stock DeepSpeed and Twin-Flow.

        Each gradient is copied down to the buffer that accumulates it, and up again (``stage3.py``,
        ``partition_grads``); a later micro-batch copies the sum up and down again. In the last backward, if the states
        are in host memory, it is then copied down once more, in fp32 (``_offload_grad_partition_at_boundary``). The
        residents of Twin-Flow have their states on the GPU.
        """
        numel = plan.workload.numel
        once_bytes = PARAM_BYTES * numel
        fp32_bytes = 4 * (numel - plan.numel(Placement.RESIDENT))
        return cls(
            down_bytes=once_bytes + fp32_bytes,
            up_bytes=once_bytes,
            accumulated_down_bytes=once_bytes,
            accumulated_up_bytes=once_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run with ZeRO-3: each of ``world_size`` ranks trains ``micro_batch`` sequences at a time.

    A sequence has ``sequence`` tokens. ``accumulation`` micro-batches make a step with one update.
    ``recompute``: activations are recomputed in backward. ``offload_param``: the 16-bit parameters are in host memory
    and are uploaded for each gather. ``trainable_share`` is the share of the parameters that are trained, with the
    others frozen, evenly in all layers: only they have gradients, states and an update. ``tensor_parallel`` ranks of a
    node divide the matrices of each layer and train the same sequences (AutoTP).
    ``attention`` is a key of ``SCORE_BYTES``. ``sub_group_size`` is that of DeepSpeed's config, in parameters of one
    rank, and ``rules`` are those of our block.
    Raise ``ModelError`` for an impossible number, and ``RulesError`` for a rule without effect on this model.
    """

    shape: ModelShape
    world_size: int
    ranks_per_node: int
    micro_batch: int
    sequence: int
    recompute: bool = True
    accumulation: int = 1
    offload_param: bool = False
    trainable_share: float = 1.0
    tensor_parallel: int = 1
    attention: str = "flash"
    sub_group_size: int = DEFAULT_SUB_GROUP_SIZE
    rules: PlacementRules = NO_RULES

    def __post_init__(self) -> None:
        for key in ("ranks_per_node", "world_size", "micro_batch", "sequence", "accumulation", "tensor_parallel"):
            others = ", or --nodes (--gpus of a cluster)" if key == "world_size" else ""
            most = {"sequence": MAX_TOKENS, "ranks_per_node": 10**4, "tensor_parallel": 10**4}.get(key, 10**6)
            require_integer(key, getattr(self, key), 1, most, f"Correct --{key.replace('_', '-')}{others}.")
        require_integer("sub_group_size", self.sub_group_size, 1, 10**15, "Correct --sub-group-size.")
        if self.attention not in SCORE_BYTES:
            kinds = ", ".join(SCORE_BYTES)
            raise ModelError(f"attention: must be one of {kinds}, found {self.attention}.\nCorrect --attention.")
        if self.micro_batch * self.sequence > MAX_TOKENS:
            rule = f"micro_batch: must be at most {MAX_TOKENS:,} tokens in all, of {self.sequence} per sequence"
            raise ModelError(f"{rule}, found {self.micro_batch}.\nCorrect --micro-batch or --sequence.")
        if not 0 < self.trainable_share <= 1:
            rule = "trainable_share: must be above 0 and at most 1"
            raise ModelError(f"{rule}, found {self.trainable_share}.\nCorrect --trainable-share.")
        if self.world_size % self.ranks_on_node:
            raise ModelError(
                f"ranks_per_node: must divide the world size, {self.world_size}, found {self.ranks_per_node}.\n"
                f"Correct --ranks-per-node or --world-size (--gpus of a cluster)."
            )
        for what, count in (("ranks of a node", self.ranks_on_node), ("key-value heads", self.shape.kv_heads)):
            if count % self.tensor_parallel:
                rule = f"tensor_parallel: must divide the number of {what}, {count}, found {self.tensor_parallel}"
                raise ModelError(f"{rule}.\nCorrect --tensor-parallel.")
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
        """Return the facts that the memory of the optimizer depends on besides the plan, if an accelerator trains.

        With offloaded parameters, the runtime has no buffer of rounded ones. It is counted here all the same, because
        the trained parameters themselves take as much page-locked memory. ``frozen_host_bytes`` are the others.
        """
        return TrainingSetup(
            longest_partition_numel=max(partition.numel for partition in self._partitions),
            accumulates=self.accumulation > 1,
            params_on_host=self.offload_param,
        )

    @property
    def frozen_host_bytes(self) -> int:
        """Return the bytes of one rank's frozen 16-bit parameters in host memory, if parameters are offloaded."""
        if not self.offload_param:
            return 0
        numel = sum(-(-shard // self.data_parallel) for shard in self._shards.values())
        return PARAM_BYTES * (numel - sum(partition.numel for partition in self._partitions))

    @cached_property
    def _partitions(self) -> list[Partition]:
        return [
            Partition(name, -(-trained_numel(shard, self.trainable_share) // self.data_parallel))
            for name, shard in self._shards.items()
        ]

    @cached_property
    def _shards(self) -> dict[str, int]:
        """Return the elements of each parameter that a tensor-parallel rank has."""
        return {name: shard_numel(name, numel, self.tensor_parallel) for name, numel in self.shape.parameters()}

    @property
    def shard_numel(self) -> int:
        """Return the parameters of one tensor-parallel rank, which its data-parallel ranks partition."""
        return sum(self._shards.values())

    @property
    def _gathered_numel(self) -> int:
        """Return the parameters of one tensor-parallel rank that it gathers in a forward.

        Shared layers stay gathered between their uses, unless DeepSpeed would traverse too many other parameters.
        """
        shared = self.shape.shared
        if shared is None:
            return self.shard_numel
        if sum(numel for name, numel in self._shards.items() if shared.has(name)) <= MAX_REUSE_DISTANCE:
            return self.shard_numel
        return sum(numel * shared.uses_of(name) for name, numel in self._shards.items())

    @property
    def data_parallel(self) -> int:
        """Return the number of ranks that train different sequences and partition the same parameters."""
        return self.world_size // self.tensor_parallel

    @property
    def ranks_on_node(self) -> int:
        """Return the number of ranks on each node."""
        return min(self.ranks_per_node, self.world_size)

    @property
    def tokens(self) -> int:
        """Return the tokens per step, over all ranks and micro-batches."""
        return self.data_parallel * self.micro_batch * self.sequence * self.accumulation

    @cached_property
    def work(self) -> MicroBatch:
        """Return the work of one rank for one micro-batch."""
        gathered_bytes = PARAM_BYTES * self._gathered_numel
        return MicroBatch(
            layers=self.shape.layers,
            elements=self.micro_batch * self.sequence * self.shape.hidden,
            forward_flops=self._forward_flops,
            backward_flops=self._iteration_flops(self.recompute) - self._forward_flops,
            ranks=self.data_parallel,
            gathered_bytes=gathered_bytes,
            reduced_bytes=self.trainable_share * PARAM_BYTES * self.shard_numel,
            uploaded_bytes=gathered_bytes / self.data_parallel if self.offload_param else 0.0,
            tensor_parallel=self.tensor_parallel,
            backward_all_reduces=FORWARD_ALL_REDUCES * (2 if self.recompute else 1),
        )

    @property
    def _forward_flops(self) -> float:
        return self.shape.forward_flops(self.micro_batch, self.sequence) / self.tensor_parallel

    def _iteration_flops(self, recompute: bool) -> float:
        """Return the operations of one micro-batch. A frozen parameter has no gradient of its own."""
        flops = self.shape.iteration_flops(self.micro_batch, self.sequence, recompute) / self.tensor_parallel
        return flops - (1 - self.trainable_share) * self._forward_flops

    def forward_s(self, flops_per_s: float) -> float:
        """Return the seconds of the arithmetic in the forward of one micro-batch."""
        return self.work.forward_flops / flops_per_s

    def backward_s(self, flops_per_s: float) -> float:
        """Return the seconds of the arithmetic in the backward of one micro-batch, including recomputation."""
        return self.work.backward_flops / flops_per_s

    def mfu(self, iteration_s: float, peak_flops: float) -> float:
        """Return the model FLOPs utilisation: forward and backward, without recomputation, over the GPU's peak."""
        return self.accumulation * self._iteration_flops(recompute=False) / (iteration_s * peak_flops)

    @cached_property
    def memory(self) -> TrainingMemory:
        """Return the GPU memory that training takes in addition to the optimizer."""
        activations = Activations(
            shape=self.shape,
            tokens=self.micro_batch * self.sequence,
            sequence=self.sequence,
            recompute=self.recompute,
            attention=self.attention,
            tensor_parallel=self.tensor_parallel,
        )
        return TrainingMemory(
            activations=activations,
            world_size=self.world_size,
            params_on_host=self.offload_param,
            trainable_share=self.trainable_share,
        )

    @property
    def gpu_bytes(self) -> int:
        """Return the peak of the GPU memory without which training fails, in addition to the optimizer."""
        return self.memory.gpu_bytes

    @property
    def activation_bytes(self) -> int:
        """Return the peak of the activations."""
        return self.memory.activations.peak_bytes
