"""Workload of a step: training, prefill or decode, with batch, sequence lengths, dtypes and training options."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shapewright.core.dtypes import DTYPE_NAMES, get_dtype
from shapewright.core.errors import WorkloadError
from shapewright.core.fields import doc_field, documented_fields
from shapewright.core.ranges import check_integer, check_text
from shapewright.workload.optimizers import OPTIMIZERS, find_recipe
from shapewright.workload.recompute import CORE, read_modules

PHASES = ("train", "prefill", "decode")
ATTENTION_KINDS = ("flash", "unfused")
EXPERT_KERNELS = ("measured", "as-16-bit")
RECOMPUTE_MODES = ("none", "selective", "full")

MAX_SEQUENCE_TOKENS = 2**27
"""Longest accepted sequence, unless the model's config states more: 13 times the longest context of a public model
(Llama-4-Scout, 10 x 2**20)."""

_LARGEST_COUNT = 2**40


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
    global_batch_size: int | None = doc_field(
        "sequences per optimizer step over all replicas; default: one micro-batch per replica and pipeline stage",
        symbol="B",
    )
    dtype: str = doc_field("element format of the GEMMs", default="bf16", choices=DTYPE_NAMES)
    weight_dtype: str | None = doc_field(
        "element format of stored weights in inference, converted to dtype when read; default: that of the GEMMs",
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
        "bandwidth (always in training; default for fp8 checkpoints with block scales)",
        default="measured",
        choices=EXPERT_KERNELS,
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
        "modules of each layer that selective recomputation repeats, such as moe_act,layernorm (Megatron-LM's names)",
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
            elif doc.choices:
                if value not in doc.choices:
                    raise WorkloadError(f"{spec.name}={value!r} is unknown; choose one of {', '.join(doc.choices)}")
            elif value is not None:
                smallest = 0 if spec.name == "context_len" else 1
                count = check_integer(spec.name, value, smallest, _LARGEST_COUNT, error=WorkloadError)
                if count is not value:  # an integer of NumPy
                    object.__setattr__(self, spec.name, count)
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
        for name in ("offload_activations", "offload_optimizer", "narrow_inputs", "deterministic_attention"):
            if getattr(self, name) and not self.is_training:
                raise WorkloadError(f"{name} has no effect in {self.phase}; omit it or use phase='train'")
        if self.offload_optimizer and OPTIMIZERS[self.optimizer].newton_schulz_steps:
            raise WorkloadError(
                f"offload_optimizer does not support optimizer={self.optimizer!r}, whose matrix iteration is too slow "
                f"on a host and which no framework offloads; use optimizer='adamw' or omit offload_optimizer"
            )

    def _check_weight_dtype(self) -> None:
        if self.weight_dtype is None:
            return
        if self.phase == "train":
            raise WorkloadError(
                f"weight_dtype={self.weight_dtype} has no effect in train, where weights are stored in the format that "
                f"GEMMs read; omit it or use phase='prefill' or 'decode'",
                field="weight_dtype",
            )
        if get_dtype(self.weight_dtype).bits > get_dtype(self.dtype).bits:
            raise WorkloadError(
                f"weight_dtype={self.weight_dtype} is wider than dtype={self.dtype}; use a format of at most "
                f"{get_dtype(self.dtype).bits} bits, or omit it",
                field="weight_dtype",
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
