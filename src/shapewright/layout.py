"""How a model is spread over devices: tensor, pipeline, data, context and expert parallel degrees."""

from __future__ import annotations

from dataclasses import dataclass

from shapewright.errors import LayoutError
from shapewright.fields import note, noted_fields

PIPELINE_SCHEDULES = ("1f1b", "gpipe", "zero-bubble", "dualpipe")
SPLIT_SCHEDULES = ("zero-bubble", "dualpipe")
"""Schedules that compute gradients of weights apart from those of inputs, to fill what a pipeline waits."""

MOST_ZERO_STAGE_IN_PIPELINES = 2
"""Highest ZeRO stage that is proposed under a pipeline: weights in shards would be gathered for each micro-batch anew.
DeepSpeed runs stage 1 there and refuses the others (runtime/pipe/engine.py), Megatron-LM's distributed optimizer is
stage 1, torchtitan's FSDP keeps weights gathered between micro-batches (reshard_after_forward = "default"), stage 2."""
_LARGEST_DEGREE = 2**24
_COUNTED_ENDS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Degrees of parallelism; the product of tensor, pipeline, data and context degrees is the number of devices.

    Experts are spread over the devices of a stage (and not over extra ones), as Megatron-LM and DeepSpeed do. By
    default their matrices are cut over the tensor axis as all others are, and expert_parallel divides data_parallel *
    context_parallel. With expert_tensor_parallel they are cut into that many instead, and whole experts go to what is
    left of the tensor axis too: expert_parallel * expert_tensor_parallel divides the devices of a stage.

    Raises:
        LayoutError: a degree is not a positive integer, degrees contradict each other, or the schedule is not known.
    """

    tensor_parallel: int = note("devices that share each weight matrix", default=1, symbol="t")
    pipeline_parallel: int = note("stages that the layers are cut into", default=1, symbol="p")
    data_parallel: int = note("replicas that see other sequences", default=1)
    context_parallel: int = note("devices that share each sequence", default=1)
    expert_parallel: int = note("devices that share the experts of one layer", default=1)
    expert_tensor_parallel: int | None = note(
        "devices that share each expert's matrices; by default the tensor degree, 1 spreads whole experts over the "
        "tensor axis too",
        default=None,
    )
    sequence_parallel: bool = note("split norms and residuals over the tensor axis too", default=True)
    zero_stage: int = note(
        "sharding over replicas: 0 none, 1 optimiser states, 2 gradients too, 3 weights too", default=0
    )
    virtual_pipeline: int = note("model chunks per pipeline stage (interleaved schedule)", default=1)
    pipeline_schedule: str = note(
        "order of a pipeline's passes: 1f1b (interleaved with chunks), gpipe (all forward, then all backward), "
        "zero-bubble (ZB-H1: weight gradients fill the end), dualpipe (DeepSeek-V3: a stage from either end on each "
        "device, exchanges of experts beside another micro-batch)",
        default="1f1b",
        choices=PIPELINE_SCHEDULES,
    )
    account_for_embedding_in_pipeline_split: bool = note(
        "count the embedding as a layer where stages are cut, so that the first has a layer less, as Megatron-LM's "
        "argument of that name does",
        default=False,
    )
    account_for_loss_in_pipeline_split: bool = note(
        "count logits and loss as a layer likewise, so that the last stage has one less: 126 layers and both ends are "
        "128, or 16 stages of 8 chunks",
        default=False,
    )

    def __post_init__(self) -> None:
        for spec, field_note in noted_fields(type(self)):
            value = getattr(self, spec.name)
            if spec.name == "sequence_parallel" or (spec.name == "expert_tensor_parallel" and value is None):
                continue
            if spec.name in _COUNTED_ENDS:
                if not isinstance(value, bool):
                    raise LayoutError(f"{spec.name}={value!r} must be true or false")
                if value and self.pipeline_parallel == 1:
                    raise LayoutError(f"{spec.name} needs pipeline_parallel above 1; leave it out")
                continue
            if field_note.choices:
                if value not in field_note.choices:
                    allowed = ", ".join(field_note.choices)
                    raise LayoutError(f"{spec.name}={value!r} is not known; choose one of {allowed}")
                continue
            smallest, largest = (0, 3) if spec.name == "zero_stage" else (1, _LARGEST_DEGREE)
            if not isinstance(value, int) or isinstance(value, bool) or not smallest <= value <= largest:
                raise LayoutError(f"{spec.name}={value!r} must be a whole number from {smallest} to {largest}")
        self._check_experts()
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise LayoutError(f"virtual_pipeline={self.virtual_pipeline} needs pipeline_parallel above 1")
        if self.pipeline_schedule != "1f1b":
            if self.pipeline_parallel == 1:
                raise LayoutError(f"pipeline_schedule={self.pipeline_schedule!r} needs pipeline_parallel above 1")
            if self.virtual_pipeline > 1:
                raise LayoutError(
                    f"virtual_pipeline={self.virtual_pipeline} interleaves 1f1b and does not go with "
                    f"pipeline_schedule={self.pipeline_schedule!r}; use one of the two"
                )
        if self.pipeline_schedule == "dualpipe" and self.pipeline_parallel % 2:
            raise LayoutError(
                f"pipeline_schedule='dualpipe' pairs stages from both ends: pipeline_parallel={self.pipeline_parallel} "
                f"must be even; use {self.pipeline_parallel + 1} or {self.pipeline_parallel - 1}"
            )

    def _check_experts(self) -> None:
        """Check that the devices of a stage hold whole copies of its experts.

        Raises:
            LayoutError: they do not.
        """
        if self.devices_per_stage % (self.expert_parallel * self.tensor_degree_of_experts) == 0:
            return
        if self.expert_tensor_parallel is None:
            wider = ", or give the tensor axis whole experts with --expert-tensor-parallel 1"
            raise LayoutError(
                f"expert_parallel={self.expert_parallel} must divide data_parallel * context_parallel = "
                f"{self.data_parallel} * {self.context_parallel}; raise --data-parallel or lower --expert-parallel"
                f"{wider if self.tensor_parallel > 1 else ''}"
            )
        raise LayoutError(
            f"expert_parallel * expert_tensor_parallel = {self.expert_parallel} * {self.expert_tensor_parallel} must "
            f"divide tensor_parallel * data_parallel * context_parallel = {self.tensor_parallel} * "
            f"{self.data_parallel} * {self.context_parallel}; raise --data-parallel or lower one of the two"
        )

    @property
    def devices_per_stage(self) -> int:
        """Devices of one pipeline stage."""
        return self.tensor_parallel * self.data_parallel * self.context_parallel

    @property
    def tensor_degree_of_experts(self) -> int:
        """Devices that share each matrix of a routed expert."""
        return self.tensor_parallel if self.expert_tensor_parallel is None else self.expert_tensor_parallel

    @property
    def cuts_experts_apart(self) -> bool:
        """Whether routed experts are cut over another number of devices than all other matrices."""
        return self.tensor_degree_of_experts != self.tensor_parallel

    @property
    def keeps_experts_in_tensor_axis(self) -> bool:
        """Whether the devices of one tensor axis hold all experts of a layer."""
        return self.expert_parallel * self.tensor_degree_of_experts == self.tensor_parallel

    @property
    def replicas_of_experts(self) -> int:
        """Devices that hold the same routed experts (Megatron-LM: expert data parallel size)."""
        return self.devices_per_stage // (self.tensor_degree_of_experts * self.expert_parallel)

    @property
    def num_devices(self) -> int:
        """Devices in the whole job."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel * self.context_parallel

    @property
    def counted_ends(self) -> tuple[bool, bool]:
        """Whether embedding and loss count as a layer each where stages are cut."""
        return self.account_for_embedding_in_pipeline_split, self.account_for_loss_in_pipeline_split

    def layers_of_stage(self, num_layers: int, index: int) -> range:
        """Layers of one pipeline stage: as many on each, but for the last, and for ends that count as a layer.

        Args:
            num_layers: Layers of the stack.
            index: The stage, from 0.

        >>> layout = ParallelLayout(pipeline_parallel=3)
        >>> [len(layout.layers_of_stage(7, index)) for index in range(3)]
        [3, 3, 1]
        >>> both = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
        >>> layout = ParallelLayout(pipeline_parallel=3, **both)
        >>> [len(layout.layers_of_stage(7, index)) for index in range(3)]
        [2, 3, 2]

        Source: NVIDIA/Megatron-LM, megatron/core/transformer/transformer_block.py (get_num_layers_to_build) and
            transformer_layer.py (get_transformer_layer_offset).
        """
        before = int(self.account_for_embedding_in_pipeline_split)
        per_stage = -(-(num_layers + sum(self.counted_ends)) // self.pipeline_parallel)
        first = max(index * per_stage - before, 0)
        return range(first, max(min((index + 1) * per_stage - before, num_layers), first))

    @property
    def splits_sequence_over_tensor(self) -> bool:
        """Whether norms and residuals run on 1/t of the tokens."""
        return self.sequence_parallel and self.tensor_parallel > 1
