"""The vision tower of a model as a job of its own: its images are the sequences of an encoder."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shapewright.core.dtypes import get_dtype
from shapewright.workload.linears import find_missing_targets

if TYPE_CHECKING:
    from shapewright.models.images import Patches
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload

_MAX_NARROW_BITS = 8


def has_tower(config: TransformerConfig, workload: Workload) -> bool:
    """Whether a step runs a vision tower; decode reads the tokens of images from the cache."""
    return config.vision is not None and workload.images > 0 and workload.phase != "decode"


def count_images(config: TransformerConfig, workload: Workload) -> int:
    """Count the images of one sequence: one where a sequence is an image, 0 where there are none."""
    return 1 if config.patches is not None else workload.images


def count_image_tokens(config: TransformerConfig, workload: Workload) -> int:
    """Count the tokens of the images of one sequence in the language model; 0 without images."""
    if config.vision is None:
        return 0
    patches: Patches = config.vision.patches
    return workload.images * patches.count_projected(workload.image_pixels)


def tower_job(
    config: TransformerConfig, workload: Workload, layout: ParallelLayout, num_passes: int = 1
) -> tuple[TransformerConfig, Workload, ParallelLayout]:
    """Return the vision tower of a model, with the images that a step gives it and the layout of the first stage.

    A tower without trained weights has a forward pass alone: its job trains the last 0 layers.

    Raises:
        WorkloadError: an image is smaller than a token, or its patches cannot be merged.
    """
    tower: TransformerConfig = config.vision
    assert tower.patches is not None
    images, num_tokens = workload.micro_batch_size * workload.images, tower.patches.count_tokens(workload.image_pixels)
    is_narrow = get_dtype(workload.dtype).bits <= _MAX_NARROW_BITS
    trained = _weight_fields(tower, workload)
    own = replace(
        workload,
        phase="prefill" if workload.phase == "decode" else workload.phase,
        micro_batch_size=images,
        seq_len=num_tokens,
        context_len=0,
        # Recipes in 8 bits or less leave the tower wide.
        dtype="bf16" if is_narrow else workload.dtype,
        narrow_inputs=workload.narrow_inputs and not is_narrow,
        global_batch_size=num_passes * images * layout.data_parallel if workload.is_training else None,
        images=0,
        packed=None,
        loss_chunks=1,
        recompute_layers=None,
        **trained,
    )
    if "last_layers" in trained:
        own = own.resized(last_layers=0)
    single = replace(
        layout,
        pipeline_parallel=1,
        virtual_pipeline=1,
        pipeline_schedule="1f1b",
        context_parallel=1,
        expert_parallel=1,
        expert_tensor_parallel=None,
        # The tokens of an image cannot be padded to the tensor axis, as a sequence can.
        sequence_parallel=layout.sequence_parallel and num_tokens % layout.tensor_parallel == 0,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )
    return tower, own, single


def _weight_fields(tower: TransformerConfig, workload: Workload) -> dict[str, Any]:
    """Return how the tower's weights are stored and trained: with adapters of the modules that it has, if any.

    The last layers of the model are not those of the tower, which comes before them.
    """
    stored = {"weight_dtype": workload.weight_dtype if workload.is_training else None}
    targets = workload.lora_targets
    if workload.has_adapters and targets is not None:
        missing = find_missing_targets(tower, targets)
        found = [name for name in targets.split(",") if name not in missing]
        if found:
            return {**stored, "lora_targets": ",".join(found)}
    elif workload.last_layers is None:
        return stored
    unadapted = {"lora_rank": None, "lora_targets": None, "lora_dropout": 0.0, "optimizer": "adamw"}
    return unadapted | {"finetune": "last-layers", "last_layers": 1, "weight_dtype": None}
