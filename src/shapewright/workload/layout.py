"""Parallel layout of a model: degrees of tensor, pipeline, data, context and expert parallelism, ZeRO and schedule."""

from __future__ import annotations

from shapewright.core.errors import LayoutError
from shapewright.core.fields import doc_field, documented_fields
from shapewright.core.ranges import check_integer
from shapewright.core.records import dataclass
from shapewright.core.texts import FieldName, with_fields

PIPELINE_SCHEDULES = ("1f1b", "gpipe", "zero-bubble", "dualpipe")
SPLIT_BACKWARD_SCHEDULES = ("zero-bubble", "dualpipe")
"""Schedules that split the backward pass, to fill the pipeline bubble with weight gradients."""

MAX_ZERO_STAGE_IN_PIPELINES = 2
"""Highest ZeRO stage that is proposed together with a pipeline; stage 3 would gather the weights for every micro-batch.

DeepSpeed allows only stage 1 there (runtime/pipe/engine.py), Megatron-LM's distributed optimizer is stage 1, and
torchtitan's FSDP keeps weights gathered between micro-batches (reshard_after_forward = "default"), which is stage 2."""

_LARGEST_DEGREE = 2**24
ENDS_AS_LAYERS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""Fields that count the embedding and the loss as layers of a pipeline."""


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Degrees of parallelism; the product of tensor, pipeline, data and context degrees is the number of devices.

    Expert parallelism distributes experts over the existing devices of a stage, as in Megatron-LM and DeepSpeed. By
    default the matrices of experts are split over the tensor axis like all others, and expert_parallel must divide
    data_parallel * context_parallel. With expert_tensor_parallel they are split over that many devices instead, the
    remaining devices of the tensor axis hold other experts, and expert_parallel * expert_tensor_parallel must divide
    the number of devices of a stage.

    Raises:
        LayoutError: a degree is not a positive integer, degrees contradict each other, or the schedule is unknown.
    """

    tensor_parallel: int = doc_field("devices that share each weight matrix", default=1, symbol="t")
    pipeline_parallel: int = doc_field("stages that the layers are divided into", default=1, symbol="p")
    data_parallel: int = doc_field("replicas that process different sequences", default=1)
    context_parallel: int = doc_field("devices that share each sequence", default=1)
    expert_parallel: int = doc_field("devices that share the experts of one layer", default=1)
    expert_tensor_parallel: int | None = doc_field(
        "devices that share each expert's matrices; default: the tensor degree; 1 also distributes whole experts over "
        "the tensor axis",
        default=None,
    )
    sequence_parallel: bool = doc_field("split norms and residuals over the tensor axis as well", default=True)
    zero_stage: int = doc_field(
        "sharding over replicas: 0 none, 1 optimizer states, 2 also gradients, 3 also weights", default=0
    )
    virtual_pipeline: int = doc_field("model chunks per pipeline stage (interleaved schedule)", default=1)
    pipeline_schedule: str = doc_field(
        "pipeline schedule: 1f1b (interleaved if virtual_pipeline > 1), gpipe (all forward, then all backward), "
        "zero-bubble (ZB-H1: weight gradients fill the bubble), dualpipe (DeepSeek-V3: each device has a stage from "
        "both ends and overlaps the expert exchange with another micro-batch)",
        default="1f1b",
        choices=PIPELINE_SCHEDULES,
    )
    account_for_embedding_in_pipeline_split: bool = doc_field(
        "count the embedding as a layer when dividing layers into stages, so that the first stage has one less "
        "(Megatron-LM's argument of the same name)",
        default=False,
    )
    account_for_loss_in_pipeline_split: bool = doc_field(
        "count logits and loss as a layer when dividing layers into stages, so that the last stage has one less: 126 "
        "layers and both ends make 128, or 16 stages of 8 chunks",
        default=False,
    )

    def __post_init__(self) -> None:
        for spec, doc in documented_fields(type(self)):
            value = getattr(self, spec.name)
            if spec.name == "expert_tensor_parallel" and value is None:
                continue
            if isinstance(spec.default, bool):
                if not isinstance(value, bool):
                    raise LayoutError(f"{spec.name}={value!r} must be true or false")
                if value and spec.name in ENDS_AS_LAYERS and self.pipeline_parallel == 1:
                    raise LayoutError(
                        with_fields("{name} needs {pipeline_parallel} above 1", name=FieldName(spec.name)),
                        advice="omit it",
                    )
                continue
            if doc.choices:
                if value not in doc.choices:
                    allowed = ", ".join(doc.choices)
                    raise LayoutError(f"{spec.name}={value!r} is unknown; choose one of {allowed}")
                continue
            smallest, largest = (0, 3) if spec.name == "zero_stage" else (1, _LARGEST_DEGREE)
            count = check_integer(spec.name, value, smallest, largest, error=LayoutError)
            if count is not value:  # an integer of NumPy
                object.__setattr__(self, spec.name, count)
        self._check_experts()
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise LayoutError(
                f"virtual_pipeline={self.virtual_pipeline} needs " + with_fields("{pipeline_parallel} above 1"),
                field="virtual_pipeline",
            )
        if self.pipeline_schedule != "1f1b":
            if self.pipeline_parallel == 1:
                raise LayoutError(
                    f"pipeline_schedule={self.pipeline_schedule!r} needs " + with_fields("{pipeline_parallel} above 1"),
                    field="pipeline_schedule",
                )
            if self.virtual_pipeline > 1:
                raise LayoutError(
                    f"virtual_pipeline={self.virtual_pipeline} requires pipeline_schedule='1f1b', not "
                    f"{self.pipeline_schedule!r}; use one of the two",
                    field="virtual_pipeline",
                )
        if self.pipeline_schedule == "dualpipe" and self.pipeline_parallel % 2:
            raise LayoutError(
                f"pipeline_schedule='dualpipe' pairs stages from both ends, so pipeline_parallel="
                f"{self.pipeline_parallel} must be even; use {self.pipeline_parallel - 1} or "
                f"{self.pipeline_parallel + 1}"
            )

    def _check_experts(self) -> None:
        """Check that the devices of a stage hold complete copies of its experts.

        Raises:
            LayoutError: the expert degrees do not divide the number of devices.
        """
        if self.devices_per_stage % (self.expert_parallel * self.expert_tensor_degree) == 0:
            return
        if self.expert_tensor_parallel is None:
            wider = ", or use expert_tensor_parallel=1 to distribute whole experts over the tensor axis"
            raise LayoutError(
                f"expert_parallel={self.expert_parallel} must divide "
                + with_fields("{data_parallel} * {context_parallel}")
                + f" = {self.data_parallel} * {self.context_parallel}; "
                + with_fields("raise {data_parallel} or lower {expert_parallel}")
                + (wider if self.tensor_parallel > 1 else ""),
                field="expert_parallel",
            )
        raise LayoutError(
            with_fields("{expert_parallel} * {expert_tensor_parallel}")
            + f" = {self.expert_parallel} * {self.expert_tensor_parallel} must divide "
            + with_fields("{tensor_parallel} * {data_parallel} * {context_parallel}")
            + f" = {self.tensor_parallel} * {self.data_parallel} * {self.context_parallel}; "
            + with_fields("raise {data_parallel} or lower one of the two")
        )

    @property
    def devices_per_stage(self) -> int:
        """Number of devices of one pipeline stage."""
        return self.tensor_parallel * self.data_parallel * self.context_parallel

    @property
    def expert_tensor_degree(self) -> int:
        """Number of devices that share each matrix of a routed expert."""
        return self.tensor_parallel if self.expert_tensor_parallel is None else self.expert_tensor_parallel

    @property
    def has_own_expert_degree(self) -> bool:
        """Whether routed experts are split over another number of devices than all other matrices."""
        return self.expert_tensor_degree != self.tensor_parallel

    @property
    def keeps_experts_in_tensor_group(self) -> bool:
        """Whether the devices of one tensor-parallel group hold all experts of a layer."""
        return self.expert_parallel * self.expert_tensor_degree == self.tensor_parallel

    def exchanges_expert_rows(self, *, is_training: bool) -> bool:
        """Whether rows are sent to the devices of their experts, and not all tokens gathered where they are."""
        if not self.has_own_expert_degree:
            return self.expert_parallel > 1
        return is_training or not self.keeps_experts_in_tensor_group

    @property
    def num_expert_replicas(self) -> int:
        """Number of devices that hold the same routed experts (Megatron-LM: expert data parallel size)."""
        return self.devices_per_stage // (self.expert_tensor_degree * self.expert_parallel)

    @property
    def num_devices(self) -> int:
        """Number of devices of the job."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel * self.context_parallel

    @property
    def default_microbatches(self) -> int:
        """Micro-batches of a replica in a step without a global batch: one for each stage, with DualPipe two."""
        return self.pipeline_parallel * (2 if self.pipeline_schedule == "dualpipe" else 1)

    @property
    def ends_as_layers(self) -> tuple[bool, bool]:
        """Whether embedding and loss each count as a layer when layers are divided into stages."""
        return self.account_for_embedding_in_pipeline_split, self.account_for_loss_in_pipeline_split

    def layers_of_stage(self, num_layers: int, index: int) -> range:
        """Indices of the layers of one pipeline stage.

        Every stage has the same number of layers, except the last one and those with an end that counts as a layer.

        Args:
            num_layers: Number of layers of the model.
            index: Index of the stage, from 0.

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
        return layers_of_stage(num_layers, self.pipeline_parallel, index, self.ends_as_layers)

    @property
    def splits_sequence_over_tensor(self) -> bool:
        """Whether norms and residuals process 1/t of the tokens (Megatron-LM's sequence parallelism)."""
        return self.sequence_parallel and self.tensor_parallel > 1


def layers_of_stage(num_layers: int, num_stages: int, index: int, ends_as_layers: tuple[bool, bool]) -> range:
    """Indices of the layers of one of a number of pipeline stages; see ParallelLayout.layers_of_stage."""
    per_stage = -(-(num_layers + sum(ends_as_layers)) // num_stages)
    first = max(index * per_stage - ends_as_layers[0], 0)
    return range(first, max(min((index + 1) * per_stage - ends_as_layers[0], num_layers), first))
