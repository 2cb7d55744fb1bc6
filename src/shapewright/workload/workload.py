"""Workload of a step: training, prefill or decode, with batch, sequence lengths, dtypes and training options."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from shapewright.core.dtypes import DTYPE_NAMES, get_dtype
from shapewright.core.errors import WorkloadError, short_repr
from shapewright.core.fields import doc_field, documented_fields
from shapewright.core.ranges import check_integer, check_number, check_text
from shapewright.core.records import dataclass
from shapewright.core.texts import FieldName, with_fields
from shapewright.workload.finetuning import (
    ADAPTER_METHODS,
    DEFAULT_RANK,
    METHODS,
    QUANTIZED_DTYPE,
    TARGET_GROUPS,
    is_target,
    pack_sequence,
    read_targets,
)
from shapewright.workload.optimizers import OPTIMIZERS, find_recipe
from shapewright.workload.recompute import CORE, read_modules

if TYPE_CHECKING:
    from shapewright.core.numeric import Count

PHASES = ("train", "prefill", "decode")
ATTENTION_KINDS = ("flash", "unfused")
EXPERT_KERNELS = ("measured", "as-16-bit")
KERNELS = ("torch", "fused")
RECOMPUTE_MODES = ("none", "selective", "full")
OFFLOADS = ("offload_activations", "offload_optimizer")
"""Fields that offload to host memory."""

MAX_SEQUENCE_TOKENS = 2**27
"""Longest accepted sequence, unless the model's config states more: 13 times the longest context of a public model
(Llama-4-Scout, 10 x 2**20)."""

_LARGEST_COUNT = 2**40
_LARGEST_SIDE = 2**16  # pixels


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step of training or one pass of inference, as one data-parallel replica runs it.

    Raises:
        WorkloadError: a field is out of range or not among its choices, or fields contradict each other.
    """

    phase: str = doc_field(
        "train: forward, backward and optimizer; prefill: forward over prompts; decode: one token per sequence",
        default="train",
        choices=PHASES,
    )
    micro_batch_size: int = doc_field("sequences of one pass", default=4, symbol="b")
    seq_len: int = doc_field("tokens per sequence in training, prompt tokens in prefill", default=2048, symbol="s")
    context_len: int = doc_field("tokens already in the KV cache (decode: before the new token)", default=0, symbol="c")
    images: int = doc_field("images in each sequence, whose tokens are part of it (vision-language models)", default=0)
    image_size: str | None = doc_field(
        "height and width of an image, such as 448,672, or one number for a square; default: that of the model"
    )
    global_batch_size: int | None = doc_field(
        "sequences per optimizer step over all replicas; default: one micro-batch per replica and pipeline stage",
        symbol="B",
    )
    dtype: str = doc_field("element format of the GEMMs", default="bf16", choices=DTYPE_NAMES)
    weight_dtype: str | None = doc_field(
        "element format of stored weights in inference, and of frozen weights with adapters, converted to dtype when "
        "read; default: that of the GEMMs, 4 bits for qlora",
        choices=DTYPE_NAMES,
    )
    kv_cache_dtype: str | None = doc_field(
        "element format of the KV cache; default: that of the GEMMs", choices=DTYPE_NAMES
    )
    kv_block_tokens: int = doc_field("tokens per block of a paged KV cache; 1: not paged", default=1)
    attention: str = doc_field(
        "flash: one fused kernel; unfused: two batched GEMMs with softmax between them",
        default="flash",
        choices=ATTENTION_KINDS,
    )
    deterministic_attention: bool = doc_field(
        "fused attention adds gradients of queries in a fixed order in training, so that runs repeat bit by bit",
        default=False,
    )
    expert_kernel: str = doc_field(
        "expert kernels in 8 or 4 bits in inference: measured: as fast as the measured kernel of the serving library; "
        "as-16-bit: at the efficiency of its 16-bit kernels if the measured one reaches less than half of their "
        "bandwidth (always in training; default for fp8 checkpoints with block scales and in plans of serving)",
        default="measured",
        choices=EXPERT_KERNELS,
    )
    kernels: str | None = doc_field(
        "kernels of RMS norms, rotary embeddings, gated activations and cross entropy: torch: the chains that Hugging "
        "Face models run in PyTorch; fused: one kernel each, with the loss computed chunk by chunk so that logits are "
        "never kept (Liger); default: one kernel each, and PyTorch's cross entropy",
        choices=KERNELS,
    )
    fused_activation: bool = doc_field(
        "activation, gate and routing weight are one kernel that saves only its inputs for the backward pass",
        default=True,
    )
    narrow_inputs: bool = doc_field(
        "GEMMs in fp8 or fp4 save their inputs in that format for the backward pass (Transformer Engine); otherwise in "
        "16 bits",
        default=False,
    )
    fused_experts: bool = doc_field(
        "biases of routed experts and the clamp before their activation are fused into other kernels in training; "
        "Megatron-LM runs separate kernels",
        default=True,
    )
    narrow_dispatch: bool = doc_field(
        "fp8 inputs of experts are sent to them in fp8 (DeepEP); Megatron-LM sends 16 bits", default=True
    )
    recompute: str = doc_field("activation recomputation in training", default="none", choices=RECOMPUTE_MODES)
    recompute_modules: str = doc_field(
        "modules of each layer that selective recomputation repeats, such as moe_act,layernorm (Megatron-LM's names), "
        "or alternate_gemms: every second GEMM and all but attention and the other GEMMs (torchtitan's op)",
        default=CORE,
    )
    recompute_layers: int | None = doc_field(
        "layers of each pipeline stage that full recomputation repeats (Megatron's block method); default: all"
    )
    loss_chunks: int = doc_field(
        "chunks of tokens for logits and cross entropy, one in memory at a time (fused linear cross entropy)",
        default=1,
    )
    optimizer: str = doc_field(
        "optimizer, which sets the states kept and moved for each parameter", default="adamw", choices=tuple(OPTIMIZERS)
    )
    offload_activations: bool = doc_field(
        "move tensors saved for the backward pass to host memory until they are needed", default=False
    )
    offload_optimizer: bool = doc_field(
        "keep optimizer states in host memory and run the optimizer step on the host (ZeRO-Offload)", default=False
    )

    finetune: str = doc_field(
        "weights that training updates: full: all; lora, qlora (frozen weights in 4 bits), dora: those of adapters; "
        "last-layers: those of the last layers",
        default="full",
        choices=METHODS,
    )
    lora_rank: int | None = doc_field(f"rank of the adapters; default: {DEFAULT_RANK}", symbol="r")
    lora_targets: str | None = doc_field(
        f"modules with adapters: {', '.join(TARGET_GROUPS)}, or names such as q_proj,v_proj; default: all-linear"
    )
    lora_dropout: float = doc_field(
        "probability of dropout before the adapters, which is a kernel and a saved copy of their inputs", default=0.0
    )
    last_layers: int | None = doc_field("number of layers that last-layers trains")
    galore_rank: int | None = doc_field("rank of GaLore's projections; default: a quarter of the hidden size")
    galore_interval: int | None = doc_field("steps between updates of GaLore's projections by an SVD; default: 200")
    packed: str | None = doc_field(
        "documents packed into each training sequence, which attend to themselves only: their lengths, such as "
        "512,1536 or 8x256, or mean:700"
    )

    def __post_init__(self) -> None:
        for spec, doc in documented_fields(type(self)):
            value = getattr(self, spec.name)
            if doc.choices == DTYPE_NAMES:
                if value is not None:
                    object.__setattr__(
                        self, spec.name, get_dtype(check_text(spec.name, value, error=WorkloadError)).name
                    )
            elif isinstance(spec.default, bool):
                if not isinstance(value, bool):
                    raise WorkloadError(f"{spec.name}={value!r} must be true or false")
            elif spec.name == "recompute_modules":
                object.__setattr__(self, spec.name, ",".join(read_modules(str(value))))
            elif spec.name == "optimizer":
                find_recipe(
                    check_text(spec.name, value, error=WorkloadError), self.dtype if self.is_training else "bf16"
                )
            elif spec.name == "lora_dropout":
                number = check_number(spec.name, value, 0.0, 1.0, error=WorkloadError, exclude_high=True)
                object.__setattr__(self, spec.name, float(number))
            elif spec.name == "packed":
                if value is not None:
                    pack_sequence(check_text(spec.name, value, error=WorkloadError), self.seq_len)
            elif spec.name == "image_size":
                if value is not None:
                    read_image_size(check_text(spec.name, value, error=WorkloadError))
            elif spec.name == "lora_targets":
                if value is not None:
                    object.__setattr__(self, spec.name, read_targets(check_text(spec.name, value, error=WorkloadError)))
            elif doc.choices:
                if value not in doc.choices and not (value is None and spec.default is None):
                    raise WorkloadError(f"{spec.name}={value!r} is unknown; choose one of {', '.join(doc.choices)}")
            elif value is not None:
                smallest = 0 if spec.name in ("context_len", "images") else 1
                count = check_integer(spec.name, value, smallest, _LARGEST_COUNT, error=WorkloadError)
                if count is not value:  # an integer of NumPy
                    object.__setattr__(self, spec.name, count)
        self._check_finetuning()
        self._check_weight_dtype()
        if self.recompute_layers is not None and self.recompute != "full":
            raise WorkloadError(
                f"recompute_layers={self.recompute_layers} requires recompute='full', not {self.recompute!r}",
                field="recompute_layers",
            )
        if self.loss_chunks > 1 and not self.is_training:
            raise WorkloadError(
                f"loss_chunks={self.loss_chunks} has no effect in {self.phase}; omit it", field="loss_chunks"
            )
        if self.phase != "train" and self.recompute != "none":
            raise WorkloadError(
                f"recompute={self.recompute!r} has no effect in {self.phase}; omit it or use phase='train'",
                field="recompute",
            )
        self._check_training_options()

    def resized(self, **sizes: Any) -> Self:
        """Return a copy with other counts, which are not checked again; lowering takes arrays where it does not branch.

        >>> Workload().resized(micro_batch_size=2).micro_batch_size
        2
        """
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.__dict__.update(sizes)
        assert len(copy.__dict__) == len(self.__dict__), f"no field {sorted(sizes)}"
        return copy

    @property
    def image_pixels(self) -> tuple[int, int] | None:
        """Height and width of an image; None for those of the model. [pixel]"""
        return None if self.image_size is None else read_image_size(self.image_size)

    @property
    def recompute_text(self) -> str:
        """Recomputation in words, with modules or layers unless they are the default."""
        if self.recompute == "none":
            return "no recompute"
        parts = ""
        if self.recompute == "selective" and self.recompute_modules != CORE:
            parts = f" of {self.recompute_modules}"
        if self.recompute_layers is not None:
            parts = f" of {self.recompute_layers} {'layer' if self.recompute_layers == 1 else 'layers'} a stage"
        return f"{self.recompute} recompute{parts}"

    def _check_training_options(self) -> None:
        for name in (*OFFLOADS, "narrow_inputs", "deterministic_attention"):
            if getattr(self, name) and not self.is_training:
                raise WorkloadError(
                    with_fields("{name} has no effect in {phase}", name=FieldName(name), phase=self.phase),
                    advice="omit it or use phase='train'",
                )
        if self.offload_optimizer and OPTIMIZERS[self.optimizer].works_on_matrices:
            raise WorkloadError(
                with_fields("{offload_optimizer} does not support")
                + f" optimizer={self.optimizer!r}, whose GEMMs are too slow on a host and which no framework offloads",
                advice=with_fields("use optimizer='adamw' or omit {offload_optimizer}"),
            )

    def _check_weight_dtype(self) -> None:
        if self.weight_dtype is None:
            return
        if self.phase == "train" and not self.has_adapters:
            raise WorkloadError(
                f"weight_dtype={self.weight_dtype} has no effect in train, where weights are stored in the format that "
                f"GEMMs read; omit it, use phase='prefill' or 'decode', or freeze the weights with finetune='qlora'",
                field="weight_dtype",
            )
        if get_dtype(self.weight_dtype).bits > get_dtype(self.dtype).bits:
            raise WorkloadError(
                f"weight_dtype={self.weight_dtype} is wider than dtype={self.dtype}; use a format of at most "
                f"{get_dtype(self.dtype).bits} bits, or omit it",
                field="weight_dtype",
            )

    def _check_finetuning(self) -> None:
        """Check the fields of fine-tuning, and set those that a method implies."""
        if not self.is_training:
            for name, default in (("finetune", "full"), ("packed", None)):
                if getattr(self, name) != default:
                    raise WorkloadError(
                        f"{name}={getattr(self, name)!r} has no effect in {self.phase}; omit it or use phase='train'",
                        field=name,
                    )
        for name, needed, words in (
            ("lora_rank", self.has_adapters, "finetune='lora', 'qlora' or 'dora'"),
            ("lora_targets", self.has_adapters, "finetune='lora', 'qlora' or 'dora'"),
            ("lora_dropout", self.has_adapters, "finetune='lora', 'qlora' or 'dora'"),
            *(
                (
                    name,
                    OPTIMIZERS[self.optimizer].projection_bytes > 0.0,
                    "optimizer='galore', 'galore-8bit' or 'q-galore'",
                )
                for name in ("galore_rank", "galore_interval")
            ),
            ("last_layers", self.finetune == "last-layers", "finetune='last-layers'"),
        ):
            if getattr(self, name) not in (None, 0.0) and not needed:
                raise WorkloadError(
                    f"{name}={getattr(self, name)!r} requires {words}, not "
                    f"{self.optimizer if 'galore' in name else self.finetune!r}",
                    field=name,
                )
        if self.finetune == "last-layers" and self.last_layers is None:
            raise WorkloadError(
                "finetune='last-layers' requires the number of layers that it trains",
                advice=with_fields("set {last_layers}"),
                field="last_layers",
            )
        if self.is_training and self.optimizer == "lora-plus" and not self.has_adapters:
            raise WorkloadError(
                "optimizer='lora-plus' sets learning rates of LoRA adapters; use it with finetune='lora', 'qlora' or "
                "'dora', or optimizer='adamw'",
                field="optimizer",
            )
        if self.has_adapters and OPTIMIZERS[self.optimizer].projection_bytes:
            raise WorkloadError(
                f"optimizer={self.optimizer!r} projects gradients of whole matrices and does not combine with "
                f"finetune={self.finetune!r}; use finetune='full', or another optimizer",
                field="optimizer",
            )
        if self.finetune == "qlora" and self.weight_dtype is None:
            object.__setattr__(self, "weight_dtype", QUANTIZED_DTYPE)
        if self.packed is not None and self.attention == "unfused":
            raise WorkloadError(
                "packed requires attention='flash': unfused attention computes the scores between documents as well",
                field="packed",
            )

    @property
    def has_adapters(self) -> bool:
        """Whether all weights of the model are frozen and adapters are trained."""
        return self.finetune in ADAPTER_METHODS

    @property
    def trains_all(self) -> bool:
        """Whether every weight is trained."""
        return self.finetune == "full"

    @property
    def has_given_weights(self) -> bool:
        """Whether the step trains a model that exists, so that a change of its shape would mean another one."""
        return self.is_training and not self.trains_all

    @property
    def adapter_rank(self) -> int:
        """Rank of the adapters, 0 without."""
        return (self.lora_rank or DEFAULT_RANK) if self.has_adapters else 0

    def adapts(self, block: str, role: str) -> bool:
        """Whether a GEMM of the model has an adapter."""
        return self.has_adapters and is_target(self.lora_targets or "all-linear", block, role)

    def trained_layers(self, first: int, stop: int, num_layers: int) -> int:
        """Count the layers from ``first`` to before ``stop`` that have a backward pass: all, or the last ones."""
        if self.last_layers is None:
            return stop - first
        return max(0, stop - max(first, num_layers - self.last_layers))

    def count_loss_chunks(
        self, num_tokens: Count, embedding_size: Count, vocab_size: Count, tensor_parallel: int
    ) -> Count:
        """Count the chunks of tokens for which logits and loss are computed one after the other.

        Fused kernels divide the tokens by how much wider the vocabulary is than the embeddings, so that the logits of
        a chunk are about as large as the hidden states of all tokens, and round the rows of a chunk up to a power of
        two; not where the vocabulary is split, which the kernel does not do.

        Source: linkedin/Liger-Kernel @ead96b6, ops/fused_linear_cross_entropy.py.

        >>> fused = Workload(kernels="fused")
        >>> fused.count_loss_chunks(16384, 4096, 128256, 1), fused.count_loss_chunks(16384, 2048, 128256, 1)
        (32, 32)
        """
        if self.kernels != "fused" or not self.is_training or self.loss_chunks > 1 or tensor_parallel > 1:
            return self.loss_chunks
        rows = _round_to_power_of_two(-(-num_tokens // -(-vocab_size // embedding_size)))
        return -(-num_tokens // rows)

    def with_all_trained(self) -> Workload:
        """Return the training step that updates every weight."""
        return replace(
            self,
            finetune="full",
            lora_rank=None,
            lora_targets=None,
            lora_dropout=0.0,
            last_layers=None,
            weight_dtype=None,
        )

    def with_recompute(self, mode: str) -> Workload:
        """Return the step with another recomputation mode; recompute_layers is dropped if the mode changes."""
        return replace(self, recompute=mode, recompute_layers=self.recompute_layers if mode == self.recompute else None)

    @property
    def is_training(self) -> bool:
        """Whether the step includes gradients and the optimizer."""
        return self.phase == "train"

    @property
    def query_len(self) -> int:
        """New tokens per sequence in one pass: the whole sequence, or one token in decode."""
        return 1 if self.phase == "decode" else self.seq_len

    @property
    def kv_len(self) -> int:
        """Tokens that the query of the last position attends to, itself included."""
        return self.context_len + self.query_len


def _round_to_power_of_two(count: Count) -> Count:
    """Round up, by filling the bits below the highest one of ``count - 1``.

    >>> _round_to_power_of_two(261), _round_to_power_of_two(512)
    (512, 512)
    """
    below: Any = count - 1
    for shift in (1, 2, 4, 8, 16, 32):
        below = below | below >> shift
    rounded: Count = below + 1
    return rounded


def read_image_size(text: str) -> tuple[int, int]:
    """Read the height and width of an image: one number for a square, or two.

    Raises:
        WorkloadError: not one or two numbers of pixels.

    >>> read_image_size("448,672"), read_image_size("224")
    ((448, 672), (224, 224))
    """
    sides = [side.strip() for side in text.lower().replace("x", ",").split(",")]
    is_known = all(side.isascii() and side.isdecimal() and len(side) <= len(str(_LARGEST_SIDE)) for side in sides)
    if len(sides) > 2 or not is_known or not all(0 < int(side) <= _LARGEST_SIDE for side in sides):
        raise WorkloadError(
            f"image_size={short_repr(text)} must be a height and a width of 1 to {_LARGEST_SIDE} pixels, such as "
            f"448,672, or one number for a square",
            field="image_size",
        )
    return int(sides[0]), int(sides[-1])
