"""What is run: training, prefill or decode, with its batch, its lengths and its element format."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shapewright.dtypes import DTYPE_NAMES, get_dtype
from shapewright.errors import WorkloadError
from shapewright.fields import note, noted_fields
from shapewright.optimizers import OPTIMIZERS, find_recipe
from shapewright.recomputation import CORE, read_modules

PHASES = ("train", "prefill", "decode")
ATTENTION_KINDS = ("flash", "unfused")
EXPERT_KERNELS = ("measured", "as-16-bit")
RECOMPUTE_MODES = ("none", "selective", "full")

MOST_SEQUENCE_TOKENS = 2**27
"""Longest sequence that is taken for meant, unless a model states that it is made for more: 13 times the longest that
any public model states (Llama-4-Scout, 10 x 2**20)."""

_LARGEST_COUNT = 2**40


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One kind of step, as one data-parallel replica sees it.

    Raises:
        WorkloadError: a count is not a positive integer, or a word is not among its choices.
    """

    phase: str = note(
        "train: forward, backward and optimiser; prefill: forward over prompts; decode: one token per sequence",
        default="train",
        choices=PHASES,
    )
    micro_batch_size: int = note("sequences that one pass runs together", default=4, symbol="b")
    seq_len: int = note("tokens per sequence in training, prompt tokens in prefill", default=2048, symbol="s")
    context_len: int = note("tokens already in the KV cache (decode: before the new token)", default=0, symbol="c")
    global_batch_size: int | None = note(
        "sequences per optimiser step over all replicas; default: one micro-batch per replica and pipeline stage",
        symbol="B",
    )
    dtype: str = note("element format of the GEMMs", default="bf16", choices=DTYPE_NAMES)
    weight_dtype: str | None = note(
        "element format in which weights are stored in inference and widened as they are read; default: that of the "
        "GEMMs",
        choices=DTYPE_NAMES,
    )
    kv_cache_dtype: str | None = note("element format of the KV cache; default: that of the GEMMs", choices=DTYPE_NAMES)
    kv_block_tokens: int = note("tokens of one block of a paged KV cache; 1: no blocks", default=1)
    attention: str = note(
        "flash: fused, scores never reach memory; unfused: two batched GEMMs with softmax between",
        default="flash",
        choices=ATTENTION_KINDS,
    )
    expert_kernel: str = note(
        "served experts in 8 or 4 bits: measured: as the serving library's kernel that was measured; as-16-bit: where "
        "that one reaches less than half of the bandwidth of 16-bit kernels, at their fractions (training always; by "
        "default checkpoints in fp8 with block scales)",
        default="measured",
        choices=EXPERT_KERNELS,
    )
    fused_activation: bool = note(
        "activation, gate and routing weight are one kernel that keeps its inputs alone for the backward pass",
        default=True,
    )
    narrow_inputs: bool = note(
        "products in fp8 or fp4 keep their inputs in that format for the backward pass (Transformer Engine); otherwise "
        "in 16 bits",
        default=False,
    )
    fused_experts: bool = note(
        "biases of routed experts, and the clamp of what they activate, are parts of other kernels in training; "
        "Megatron-LM runs kernels of their own",
        default=True,
    )
    narrow_dispatch: bool = note(
        "rows in fp8 travel to their experts in fp8 (DeepEP); Megatron-LM sends 16 bits", default=True
    )
    recompute: str = note("activation recomputation in training", default="none", choices=RECOMPUTE_MODES)
    recompute_modules: str = note(
        "parts of each layer that selective recomputation takes, such as moe_act,layernorm (Megatron-LM's names)",
        default=CORE,
    )
    recompute_layers: int | None = note(
        "layers of each pipeline stage that full recomputation takes (Megatron's block method); default: all"
    )
    loss_chunks: int = note(
        "parts into which logits and cross entropy are cut, one at a time in memory (fused linear cross entropy)",
        default=1,
    )
    optimizer: str = note(
        "optimiser: what it keeps and moves of each parameter", default="adamw", choices=tuple(OPTIMIZERS)
    )
    offload_activations: bool = note(
        "keep what layers save for the backward pass in the host's memory meanwhile", default=False
    )
    offload_optimizer: bool = note(
        "keep optimiser states in the host's memory, and let the host step (ZeRO-Offload)", default=False
    )

    def __post_init__(self) -> None:
        for spec, field_note in noted_fields(type(self)):
            value = getattr(self, spec.name)
            if "dtype" in spec.name:
                if value is not None:
                    object.__setattr__(self, spec.name, get_dtype(value).name)
            elif isinstance(spec.default, bool):
                if not isinstance(value, bool):
                    raise WorkloadError(f"{spec.name}={value!r} must be true or false")
            elif spec.name == "recompute_modules":
                object.__setattr__(self, spec.name, ",".join(read_modules(str(value))))
            elif spec.name == "optimizer":
                find_recipe(value, self.dtype if self.is_training else "bf16")
            elif field_note.choices:
                if value not in field_note.choices:
                    raise WorkloadError(
                        f"{spec.name}={value!r} is not known; choose one of {', '.join(field_note.choices)}"
                    )
            elif value is not None:
                smallest = 0 if spec.name == "context_len" else 1
                if not isinstance(value, int) or isinstance(value, bool) or not smallest <= value <= _LARGEST_COUNT:
                    raise WorkloadError(f"{spec.name}={value!r} must be a whole number from {smallest} to 2**40")
        self._check_weight_dtype()
        if self.recompute_layers is not None and self.recompute != "full":
            raise WorkloadError(
                f"recompute_layers={self.recompute_layers} needs recompute='full', of which it chooses layers; "
                f"recompute is {self.recompute!r}"
            )
        if self.loss_chunks > 1 and not self.is_training:
            raise WorkloadError(f"loss_chunks={self.loss_chunks} has no meaning in {self.phase}; leave it out")
        if self.phase != "train" and self.recompute != "none":
            raise WorkloadError(
                f"recompute={self.recompute!r} has no meaning in {self.phase}; leave it out or use --phase train"
            )

        self._check_offload()

    @property
    def recompute_words(self) -> str:
        """Recomputation in words, with the parts or the layers that it takes where they are not the usual ones."""
        if self.recompute == "none":
            return "no recompute"
        parts = ""
        if self.recompute == "selective" and self.recompute_modules != CORE:
            parts = f" of {self.recompute_modules}"
        if self.recompute_layers is not None:
            parts = f" of {self.recompute_layers} {'layer' if self.recompute_layers == 1 else 'layers'} a stage"
        return f"{self.recompute} recompute{parts}"

    def _check_offload(self) -> None:
        for name in ("offload_activations", "offload_optimizer", "narrow_inputs"):
            if getattr(self, name) and not self.is_training:
                raise WorkloadError(f"{name} has no meaning in {self.phase}; leave it out or use --phase train")
        if self.offload_optimizer and OPTIMIZERS[self.optimizer].newton_schulz_steps:
            raise WorkloadError(
                f"offload_optimizer does not go with optimizer={self.optimizer!r}: its matrix products are too much "
                f"for a host, and no stack moves them back to the device; use --optimizer adamw, or leave it out"
            )

    def _check_weight_dtype(self) -> None:
        if self.weight_dtype is None:
            return
        if self.phase == "train":
            raise WorkloadError(
                f"weight_dtype={self.weight_dtype} has no meaning in train, where weights are as wide as the GEMMs "
                f"read them; leave it out or use --phase prefill or decode"
            )
        if get_dtype(self.weight_dtype).bits > get_dtype(self.dtype).bits:
            raise WorkloadError(
                f"weight_dtype={self.weight_dtype} is wider than dtype={self.dtype}; give a format of at most "
                f"{get_dtype(self.dtype).bits} bits, or leave it out"
            )

    def with_recompute(self, mode: str) -> Workload:
        """The same step with another recomputation; a choice of layers belongs to the mode that it was made for."""
        return replace(self, recompute=mode, recompute_layers=self.recompute_layers if mode == self.recompute else None)

    @property
    def is_training(self) -> bool:
        """Whether gradients and an optimiser step are part of the step."""
        return self.phase == "train"

    @property
    def query_len(self) -> int:
        """New tokens per sequence in one pass: the whole sequence, or one in decode."""
        return 1 if self.phase == "decode" else self.seq_len

    @property
    def kv_len(self) -> int:
        """Tokens that a query of the last position may attend to, itself included."""
        return self.context_len + self.query_len
