"""Image encoders, vision-language models and diffusion transformers against the models that PyTorch runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="comparing with PyTorch needs the trace extra (torch)")
pytest.importorskip("transformers", reason="comparing with PyTorch needs the trace extra (transformers)")

from diffusion_models import DiffusionTransformer
from image_models import ENCODERS, VISION_LANGUAGE, build_image_model, image_config
from traced_gemms import TracedGemm, cache_name, count_flops, count_gemms, record_gemms, trace_module, without_layout

from shapewright.lowering.flops import count_model_flops
from shapewright.lowering.model import lower
from shapewright.memory.estimate import estimate_kv_cache
from shapewright.models.parameters import count_parameters
from shapewright.models.read import list_presets, load_preset, read_model
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

pytestmark = pytest.mark.oracle

BATCH_SIZE, SIDE = 3, 56
# Unlike the eager attention of the others, it joins all images into one sequence with a mask.
_JOINED = ("pixtral", "mistral3", "qwen2_vl", "qwen3_vl")
# Its windows are indexed by values.
_NEEDS_VALUES = ("qwen2_5_vl",)
# Besides itself an image has one tile: twice as many tokens, and a vector after each row of the tile.
_TILED = ("llava_next", "llava_onevision")
_TILED_ROWS = SIDE // 14


def _count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _without_outer_products(gemms: Counter[TracedGemm]) -> Counter[TracedGemm]:
    """Leave out products of vectors, which PyTorch runs as multiplications."""
    return Counter({gemm: count for gemm, count in without_layout(gemms).items() if gemm.k > 1})


def _weights_alone(gemms: Counter[TracedGemm]) -> Counter[TracedGemm]:
    return Counter({gemm: count for gemm, count in gemms.items() if gemm.batch == 1})


@pytest.mark.parametrize("key", ENCODERS)
def test_an_encoder_equals_that_of_transformers(key: str) -> None:
    """Parameters, every GEMM forward and backward, and FLOPs; patches need no gradient."""
    model, config = build_image_model(image_config(key)), read_model(image_config(key)).config
    assert config.patches is not None
    batch_size = 1 if key in _JOINED else BATCH_SIZE
    with count_flops() as counter:
        found = trace_module(model, f"pixel_values=float32[{batch_size},3,{SIDE},{SIDE}]", assumes_values=True)
    workload = Workload(micro_batch_size=batch_size, seq_len=config.patches.count_tokens(), attention="unfused")
    lowered = lower(config, workload, ParallelLayout())

    assert count_parameters(config).total == _count(model)
    for passes in (("forward",), ("forward", "backward")):
        assert _without_outer_products(count_gemms(lowered, *passes)) == without_layout(
            count_gemms(found.operations, *passes)
        )
    if not config.patches.pools:
        assert count_model_flops(config, workload) == counter.get_total_flops()


@pytest.mark.parametrize("key", VISION_LANGUAGE)
def test_a_vision_language_model_has_the_parameters_of_transformers(key: str) -> None:
    """Tower, projector and language model together."""
    model = read_model(image_config(key))

    assert count_parameters(model.with_vision().config).total == _count(build_image_model(image_config(key)))
    assert count_parameters(model.config).vision == 0


@pytest.mark.parametrize("key", [key for key in VISION_LANGUAGE if key not in _NEEDS_VALUES])
def test_a_vision_language_model_runs_the_gemms_of_transformers(key: str) -> None:
    """A prompt with one image per sequence: tower, projector, and the language model over text and image tokens."""
    config = read_model(image_config(key)).with_vision().config
    assert config.vision is not None
    assert config.vision.patches is not None
    num_tokens, images = _count_tokens(key, config.vision.patches.count_projected((SIDE, SIDE)))
    model, inputs = _prompt(key, num_tokens)
    with torch.no_grad(), record_gemms() as recorded:
        model(**inputs, use_cache=False, logits_to_keep=1)
    workload = Workload(
        phase="prefill",
        micro_batch_size=2,
        seq_len=num_tokens + 7,
        images=images,
        image_size=f"{SIDE}",
        attention="unfused",
    )
    lowered, traced = count_gemms(lower(config, workload, ParallelLayout()), "forward"), recorded.gemms
    if key in _JOINED:
        lowered, traced = _weights_alone(lowered), _weights_alone(traced)
    assert without_layout(lowered) == without_layout(traced)


@pytest.mark.parametrize("key", [key for key in VISION_LANGUAGE if key not in _NEEDS_VALUES])
def test_a_training_step_of_a_vision_language_model(key: str) -> None:
    """Every GEMM of tower, projector and language model, forward and backward, with one image per sequence."""
    config = read_model(image_config(key)).with_vision().config
    assert config.vision is not None
    assert config.vision.patches is not None
    num_tokens, images = _count_tokens(key, config.vision.patches.count_projected((SIDE, SIDE)))
    model, inputs = _prompt(key, num_tokens)
    with record_gemms() as recorded:
        model.train()(**inputs, use_cache=False).logits.sum().backward()
    workload = Workload(
        micro_batch_size=2, seq_len=num_tokens + 7, images=images, image_size=f"{SIDE}", attention="unfused"
    )
    lowered, traced = count_gemms(lower(config, workload, ParallelLayout()), "forward", "backward"), recorded.gemms
    if key in _JOINED:
        lowered, traced = _weights_alone(lowered), _weights_alone(traced)
    assert without_layout(lowered) == without_layout(traced)


def _count_tokens(key: str, num_tokens: int) -> tuple[int, int]:
    """Tokens of one image of a user, and images of the tower."""
    return (2 * num_tokens + _TILED_ROWS, 2) if key in _TILED else (num_tokens, 1)


def _prompt(key: str, num_tokens: int) -> tuple[Any, dict[str, Any]]:
    """A tiny model with memory, since it compares token ids, and two prompts with an image each."""
    config = image_config(key)
    model_type, image_id = config["model_type"], 310
    model = build_image_model(
        {**config, "image_token_id": image_id, "image_token_index": image_id}, device="cpu"
    ).eval()
    ids = torch.randint(3, 300, (2, num_tokens + 7))
    ids[:, 2 : 2 + num_tokens] = image_id
    images = torch.ones(2, 3, SIDE, SIDE)
    inputs: dict[str, Any] = {"input_ids": ids, "pixel_values": images}
    if model_type.startswith("qwen"):
        rows = SIDE // 14
        inputs["pixel_values"] = torch.zeros(2 * rows**2, 3 * 2 * 14**2)
        inputs["image_grid_thw"] = torch.tensor([[1, rows, rows]] * 2)
        inputs["mm_token_type_ids"] = (ids == image_id).int()
    elif model_type in _TILED:
        inputs["pixel_values"] = torch.ones(2, 2, 3, SIDE, SIDE)
        inputs["image_sizes"] = torch.tensor([[SIDE, SIDE]] * 2)
    elif model_type in ("idefics3", "smolvlm"):
        inputs["pixel_values"] = images[:, None]
    elif model_type == "mistral3":
        inputs["image_sizes"] = torch.tensor([[SIDE, SIDE]] * 2)
    elif model_type == "mllama":
        inputs |= _tiles(ids.shape[1])
    elif model_type in ("gemma3", "paligemma"):
        inputs["token_type_ids"] = torch.zeros_like(ids)
    return model, inputs


def _tiles(num_tokens: int) -> dict[str, Any]:
    """An image of two tiles for each of two prompts, whose tokens all attend to it."""
    return {
        "pixel_values": torch.ones(2, 1, 2, 3, SIDE, SIDE),
        "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(2, 1, 2, dtype=torch.long),
        "cross_attention_mask": torch.ones(2, num_tokens, 1, 2),
    }


def test_layers_that_attend_to_images_cache_them_once_and_are_skipped_without() -> None:
    """Keys and values of an image are made in the prompt alone; the cache is as large as that of transformers."""
    read = read_model(image_config("mllama"))
    config, model = read.with_vision().config, build_image_model(image_config("mllama"), device="cpu").eval()
    ids, length = torch.randint(3, 300, (2, 23)), 23
    with torch.no_grad():
        cache = (output := model(input_ids=ids, **_tiles(length), use_cache=True))[cache_name(model)]
        with record_gemms() as decoded:
            mask = torch.ones(2, 1, 1, 2)
            model(input_ids=ids[:, :1], use_cache=True, cross_attention_mask=mask, **{cache_name(model): cache})
        with record_gemms() as plain:
            model(input_ids=ids, use_cache=False, logits_to_keep=1)
    assert output.logits.shape[1] == length
    sizes: dict[str, Any] = {"micro_batch_size": 2, "attention": "unfused"}
    decode = Workload(phase="decode", context_len=length, images=1, image_size=f"{SIDE}", dtype="fp32", **sizes)
    prefill = Workload(phase="prefill", seq_len=length, **sizes)
    kinds = list(config.count_kinds(range(config.num_layers)).items())
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    assert without_layout(count_gemms(lower(config, decode, ParallelLayout()), "forward")) == without_layout(
        decoded.gemms
    )
    assert without_layout(count_gemms(lower(read.config, prefill, ParallelLayout()), "forward")) == without_layout(
        plain.gemms
    )
    assert estimate_kv_cache(config, decode, ParallelLayout(), kinds) == held


@pytest.mark.parametrize("patch", [2, 4])
def test_a_diffusion_transformer_equals_the_module_of_its_paper(patch: int) -> None:
    """Parameters, every GEMM forward and backward, and FLOPs of a DiT that was written from arXiv 2212.09748."""
    sizes = {"hidden_size": 64, "depth": 3, "num_heads": 4, "patch_size": patch, "input_size": 8, "num_classes": 10}
    config = read_model({"model_type": "dit", **sizes}).config
    assert config.patches is not None
    with torch.device("meta"):
        model = DiffusionTransformer(**sizes)
    inputs = f"latents=float32[{BATCH_SIZE},4,8,8],timesteps=float32[{BATCH_SIZE}],classes=int64[{BATCH_SIZE}]"
    with count_flops() as counter:
        found = trace_module(model, inputs)
    workload = Workload(micro_batch_size=BATCH_SIZE, seq_len=config.patches.count_tokens(), attention="unfused")
    lowered = lower(config, workload, ParallelLayout())

    assert count_parameters(config).total == _count(model)
    for passes in (("forward",), ("forward", "backward")):
        assert without_layout(count_gemms(lowered, *passes)) == without_layout(count_gemms(found.operations, *passes))
    assert count_model_flops(config, workload) == counter.get_total_flops()


@pytest.mark.parametrize("name", [name for name in list_presets() if name.startswith("dit-")])
def test_presets_of_diffusion_transformers(name: str) -> None:
    """The paper's sizes have the parameters of its module."""
    given = {key: value for key, value in load_preset(name).config.items() if key not in ("model_type", "learn_sigma")}
    del given["in_channels"], given["mlp_ratio"]
    with torch.device("meta"):
        assert count_parameters(read_model(name).config).total == _count(DiffusionTransformer(**given))


@pytest.mark.parametrize(
    "name",
    [
        "vit-b-16",
        "vit-l-16",
        "vit-h-14",
        "siglip-so400m",
        "qwen2.5-vl-7b",
        "gemma-3-4b",
        "llama-3.2-11b-vision",
        "llama-3.2-90b-vision",
    ],
)
def test_presets_of_encoders_and_vision_language_models(name: str) -> None:
    """The published sizes have the parameters of transformers, vision towers included."""
    model = read_model(name)
    config = model.config if model.config.patches is not None else model.with_vision().config

    assert count_parameters(config).total == _count(build_image_model(load_preset(name).config))


def _unfused(model: Any) -> Any:
    """Use attention of separate GEMMs."""
    from diffusers.models.attention_processor import AttnProcessor

    for module in model.modules():
        if hasattr(module, "set_processor"):
            module.set_processor(AttnProcessor())
    return model


class _Denoiser(torch.nn.Module):
    """A transformer of diffusers with plain arguments."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, latents: Any, timestep: Any, classes: Any = None, caption: Any = None, resolution: Any = None,
        aspect_ratio: Any = None,
    ) -> Any:  # fmt: skip
        """Predict the noise."""
        if classes is not None:
            return self.model(latents, timestep=timestep, class_labels=classes).sample
        sizes = {"resolution": resolution, "aspect_ratio": aspect_ratio}
        return self.model(latents, timestep=timestep, encoder_hidden_states=caption, added_cond_kwargs=sizes).sample


_TINY = {"attention_head_dim": 16, "num_layers": 3, "sample_size": 8}
DIFFUSERS: dict[str, dict[str, Any]] = {
    "DiTTransformer2DModel": {**_TINY, "num_attention_heads": 4, "num_embeds_ada_norm": 10},
    "PixArtTransformer2DModel": {
        **_TINY, "num_attention_heads": 6, "caption_channels": 48, "cross_attention_dim": 96,
        "use_additional_conditions": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFUSERS)
def test_a_transformer_of_diffusers(name: str) -> None:
    """Parameters, every GEMM forward and backward, and FLOPs."""
    diffusers = pytest.importorskip(
        "diffusers", reason="comparing with diffusers needs it; the paper's module does not"
    )
    given = DIFFUSERS[name]
    config = read_model({"_class_name": name, **given}).config
    assert config.patches is not None
    with torch.device("meta"):
        model = _unfused(getattr(diffusers, name)(**given))
    inputs = f"latents=float32[{BATCH_SIZE},4,8,8],timestep=int64[{BATCH_SIZE}]"
    if config.num_caption_tokens:
        inputs += f",caption=float32[{BATCH_SIZE},{config.num_caption_tokens},48]"
        inputs += f",resolution=float32[{BATCH_SIZE},2],aspect_ratio=float32[{BATCH_SIZE},1]"
    else:
        inputs += f",classes=int64[{BATCH_SIZE}]"
    with count_flops() as counter:
        found = trace_module(_Denoiser(model), inputs, assumes_values=True)
    workload = Workload(micro_batch_size=BATCH_SIZE, seq_len=config.patches.count_tokens(), attention="unfused")
    lowered = lower(config, workload, ParallelLayout())

    assert count_parameters(config).total == _count(model)
    for passes in (("forward",), ("forward", "backward")):
        assert without_layout(count_gemms(lowered, *passes)) == without_layout(count_gemms(found.operations, *passes))
    assert count_model_flops(config, workload) == counter.get_total_flops()


def test_images_are_part_of_a_training_step() -> None:
    """A tower's gradients and its optimizer step are lowered, on the first stage alone."""
    config = read_model(image_config("llava")).with_vision().config
    workload = Workload(micro_batch_size=2, seq_len=64, images=2, global_batch_size=8)
    operations = lower(config, workload, ParallelLayout(pipeline_parallel=2, data_parallel=2))
    tower = [one for one in operations if one.name.startswith("vision.")]

    assert {one.pass_name for one in tower} == {"forward", "backward", "step"}
    assert {one.stage for one in tower} == {"first"}
    without = count_model_flops(replace(config, vision=None), replace(workload, images=0))
    assert count_model_flops(config, workload) > without
