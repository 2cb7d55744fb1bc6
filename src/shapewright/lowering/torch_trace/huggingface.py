"""Models of transformers and diffusers from a config: built on the meta device, without weights and remote code."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shapewright.core.errors import MissingExtraError, TraceError, first_line, short_repr
from shapewright.core.texts import with_fields
from shapewright.lowering.torch_trace.inputs import TensorSpec, tensor_spec
from shapewright.lowering.torch_trace.run import trace_module
from shapewright.lowering.torch_trace.trace import Trace

ATTENTION = "shapewright"
# Attention implementations in order of preference: ours records windows; the others are those of transformers.
ATTENTIONS = (ATTENTION, "sdpa", "eager")
_BUILDERS = (
    ("MODEL_FOR_CAUSAL_LM_MAPPING", "AutoModelForCausalLM"),
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "AutoModelForSeq2SeqLM"),
    ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", "AutoModelForSpeechSeq2Seq"),
    ("MODEL_FOR_MASKED_LM_MAPPING", "AutoModelForMaskedLM"),
    ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "AutoModelForImageClassification"),
    ("MODEL_MAPPING", "AutoModel"),
)
# Inputs of diffusion transformers for an image of 1024 x 1024 pixels, with the fields of their configs, and the text
# lengths of their pipelines (diffusers 0.42: pipeline_stable_diffusion_3.py, pipeline_flux.py).
_DENOISER_INPUTS = {
    "SD3Transformer2DModel": "hidden_states={dtype}[{batch},{in_channels},128,128],timestep={dtype}[{batch}],"
    "encoder_hidden_states={dtype}[{batch},333,{joint_attention_dim}],"
    "pooled_projections={dtype}[{batch},{pooled_projection_dim}]",
    "FluxTransformer2DModel": "hidden_states={dtype}[{batch},4096,{in_channels}],timestep={dtype}[{batch}],"
    "encoder_hidden_states={dtype}[{batch},512,{joint_attention_dim}],"
    "pooled_projections={dtype}[{batch},{pooled_projection_dim}],img_ids=float32[4096,3],txt_ids=float32[512,3],"
    "guidance={dtype}[{batch}]",
}
# Encoder-decoders that are also in the list of causal models are built whole.
_WHOLE_FIRST = (*_BUILDERS[1:3], _BUILDERS[0], *_BUILDERS[3:])


def build_from_config(
    values: Mapping[str, Any], dtype: str = "bfloat16", attentions: Sequence[str] = ATTENTIONS
) -> tuple[Any, str]:
    """Build the model that transformers has for a config.json object, with its language head where it has one.

    Of a multimodal config the text model is built. ``auto_map``, which names code of a repository, is ignored.

    Args:
        dtype: Element format of the weights by its torch name.
        attentions: Attention implementations to try, the first one that the model supports is used.

    Returns:
        The model on the meta device, and a note on how it was built.

    Raises:
        MissingExtraError: transformers is not installed.
        TraceError: it does not know the type, or cannot build the model.
    """
    try:
        import torch
        import transformers
    except ImportError:
        raise MissingExtraError(
            "tracing a config needs PyTorch and transformers; install them with: pip install 'shapewright[trace]'"
        ) from None
    given = copy.deepcopy(dict(values))
    for key in ("auto_map", "quantization_config", "_name_or_path", "transformers_version"):
        given.pop(key, None)
    model_type = given.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        raise TraceError(
            f"transformers {transformers.__version__} has no model_type {short_repr(model_type)}",
            advice="trace your own file instead (file.py:callable), or install a newer transformers",
        )
    try:
        whole = transformers.AutoConfig.for_model(model_type, **given)
        whole.get_text_config(decoder=True)
    except Exception as error:
        raise TraceError(f"transformers cannot read this {model_type} config: {_reason(error)}") from None
    config, builder = _find_builder(whole)
    config.use_cache = False
    dropped = _keep_all_layers(config)
    _register_attention()
    reasons = []
    for attention in attentions:
        for experts in ({"experts_implementation": "grouped_mm"}, {}):
            # A failed attempt may leave its options in the config.
            own = copy.deepcopy(config)
            try:
                with torch.device("meta"):
                    model = builder.from_config(
                        own, dtype=getattr(torch, dtype), attn_implementation=attention, **experts
                    )
            except Exception as error:
                reasons.append(_reason(error))
                continue
            note = f"built by transformers {transformers.__version__} as {type(model).__name__} from its config"
            return model, (note if attention == ATTENTION else f"{note}, with its {attention} attention") + dropped
    raise TraceError(f"transformers cannot build {model_type}: {reasons[-1]}")


def _reason(error: Exception) -> str:
    """First line of an error; where it ends in a colon, the reason in the next one without the type of an error."""
    lines = str(error).strip().splitlines()
    if len(lines) > 1 and lines[0].endswith(":"):
        return first_line(Exception(re.sub(r"^\w+Error: ", "", lines[1].strip())))
    return first_line(error)


def is_denoiser(values: Mapping[str, Any]) -> bool:
    """Whether a config is that of a model of diffusers."""
    return isinstance(values.get("_class_name"), str) and "model_type" not in values


def _build_denoiser(values: Mapping[str, Any], dtype: str) -> tuple[Any, str]:
    """Build the model that diffusers has for a config, and a note on how it was built.

    Raises:
        MissingExtraError: diffusers is not installed.
        TraceError: it does not know the class, or cannot build the model.
    """
    try:
        import diffusers
        import torch
    except ImportError:
        raise MissingExtraError(
            "tracing a diffusion transformer needs PyTorch and diffusers; install them with: "
            "pip install 'shapewright[trace]' diffusers"
        ) from None
    name = values["_class_name"]
    built: Any = getattr(diffusers, name, None) if name.isidentifier() else None
    is_model = isinstance(built, type) and issubclass(built, diffusers.ModelMixin)
    if not is_model:
        raise TraceError(
            f"diffusers {diffusers.__version__} has no model {short_repr(name)}",
            advice="trace your own file instead (file.py:callable), or install a newer diffusers",
        )
    given = {key: value for key, value in copy.deepcopy(dict(values)).items() if key not in ("auto_map", "_class_name")}
    try:
        with torch.device("meta"):
            model = built.from_config(given).to(getattr(torch, dtype))
    except Exception as error:
        raise TraceError(f"diffusers cannot build {name}: {first_line(error)}") from None
    return model, f"built by diffusers {diffusers.__version__} as {name} from its config"


def _denoiser_inputs(model: Any, batch_size: int, dtype: str) -> str:
    """Inputs of one denoising step.

    Raises:
        TraceError: they are not known for this class.
    """
    name = type(model).__name__
    if name not in _DENOISER_INPUTS:
        raise TraceError(
            f"the inputs of {name} are not known",
            advice=with_fields("give {inputs}; those of {known} are known", known=" and ".join(_DENOISER_INPUTS)),
            field="inputs",
        )
    parts = _DENOISER_INPUTS[name].format(batch=batch_size, dtype=dtype, **model.config)
    return parts if getattr(model.config, "guidance_embeds", False) else parts.partition(",guidance")[0]


def trace_built_model(
    config: Mapping[str, Any],
    inputs: str | None = None,
    *,
    source: str,
    batch_size: int,
    seq_len: int,
    dtype: str | None = None,
    **options: Any,
) -> Trace:
    """Build the model of a config.json object and trace it; see build_from_config and trace_module.

    Args:
        inputs: Inputs as text; by default those of default_inputs.
        source: Where the object was read from.
        dtype: Element format of the weights; bf16 by default.
        options: phase, fused and values, as trace_module takes them.

    Raises:
        TraceError: transformers cannot build the model, or it cannot run on the meta device.
    """
    width = tensor_spec(dtype or "bfloat16", (1,)).dtype
    if is_denoiser(config):
        model, note = _build_denoiser(config, width)
        spec = inputs or _denoiser_inputs(model, batch_size, width)
        trace = trace_module(model, spec, source=source, assumes_values=True, **options)
        return replace(trace, notes=(note, *trace.notes))
    is_training = options.get("phase", "train") == "train"
    last_error = None
    # Some models need the masks of their own attention, some have no loss of the usual form, and some mix formats.
    attempts = [(attention, has_labels, width) for has_labels in (True, False) for attention in ATTENTIONS]
    attempts += [] if dtype else [(ATTENTIONS[-1], False, "float32")]
    for attention, has_labels, own_width in attempts:
        try:
            model, note = build_from_config(config, own_width, (attention,))
            given = inputs or default_inputs(model, batch_size, seq_len, has_labels=has_labels and is_training)
            trace = trace_module(model, given, source=source, assumes_values=True, **options)
        except TraceError as error:
            last_error = error
            continue
        return replace(trace, notes=(note, *trace.notes))
    assert last_error is not None
    raise last_error


def _find_builder(whole: Any) -> tuple[Any, Any]:
    """Config and class of transformers that build the model with its head: those of the text part where it has some."""
    import transformers
    from transformers.models.auto import modeling_auto

    text = whole.get_text_config(decoder=True)
    if type(text) is type(whole):
        # Of encoder-decoders without a text part it is a copy, whose fields of the decoder are renamed.
        text = whole
    for mapping, builder in _WHOLE_FIRST if text.is_encoder_decoder else _BUILDERS:
        for config in (text, whole):
            if type(config) in getattr(modeling_auto, mapping):
                return config, getattr(transformers, builder)
    raise TraceError(f"transformers has no model for a {type(whole).__name__}")


def _keep_all_layers(config: Any) -> str:
    """Set the shares of layers that training drops at random to 0, and return words that say so, empty if they were."""
    rates = {name: value for name, value in vars(config).items() if name.endswith("layerdrop") and value}
    for name in rates:
        setattr(config, name, 0.0)
    words = "".join(f", with {name}=0 instead of {value}, so that every layer runs" for name, value in rates.items())
    parts = [value for value in vars(config).values() if hasattr(value, "get_text_config")]
    return words + "".join(map(_keep_all_layers, parts))


def _register_attention() -> None:
    """Register our attention and the masks of flash attention, which are none for sequences without padding."""
    from shapewright.lowering.torch_trace.fused_kernels import attend_as_transformers

    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
    except ImportError:
        return
    AttentionInterface.register(ATTENTION, attend_as_transformers)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, flash_attention_mask)


def default_inputs(model: Any, batch_size: int, seq_len: int, *, has_labels: bool) -> dict[str, Any]:
    """Inputs of a model of transformers: token ids and labels, images, or spectra of sound with the tokens spoken.

    Args:
        has_labels: Whether labels are given, so that the model computes its loss.
    """
    ids = TensorSpec("int64", (batch_size, seq_len))
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        config = model.config
        side = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        return {"pixel_values": TensorSpec("float32", (batch_size, config.num_channels, side, side))}
    inputs: dict[str, Any] = {"input_ids": ids}
    if model.config.model_type == "whisper":
        # Its first convolutions halve the number of frames.
        frames = (batch_size, model.config.num_mel_bins, 2 * model.config.max_source_positions)
        inputs = {"input_features": TensorSpec(str(model.dtype).removeprefix("torch."), frames)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    if has_labels and _takes(model, "labels"):
        inputs["labels"] = ids
    return inputs


def _takes(model: Any, name: str) -> bool:
    import inspect

    return name in inspect.signature(model.forward).parameters
