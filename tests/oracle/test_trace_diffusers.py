"""Configs of diffusers: built by that library where it is installed, and by a stand-in for the rest."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="tracing needs the trace extra (torch)")

from command_line import run
from shapewright.core.errors import MissingExtraError, TraceError
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.torch_trace.huggingface import trace_built_model

pytestmark = pytest.mark.oracle

FLUX = {
    "_class_name": "FluxTransformer2DModel", "in_channels": 64, "num_layers": 2, "num_single_layers": 3,
    "attention_head_dim": 16, "num_attention_heads": 4, "joint_attention_dim": 96, "pooled_projection_dim": 48,
    "axes_dims_rope": [4, 6, 6],
}  # fmt: skip


class Config(dict[str, Any]):
    """Fields by key and by attribute, as diffusers keeps them."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class TwoStreams(torch.nn.Module):  # type: ignore[misc]
    """A linear layer for each stream, and one for what conditions them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.image, self.text = torch.nn.Linear(config.in_channels, 32), torch.nn.Linear(config.joint_attention_dim, 32)
        self.pooled = torch.nn.Linear(config.pooled_projection_dim, 32)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Build it from a config without its class."""
        assert "_class_name" not in config
        return cls(Config(config))

    def forward(
        self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any, pooled_projections: Any, img_ids: Any,
        txt_ids: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Join both streams."""
        assert len(img_ids) + len(txt_ids) == 4096 + 512
        joined = torch.cat([self.image(hidden_states), self.text(encoder_hidden_states)], dim=1)
        return {"sample": joined * (timestep[:, None] * self.pooled(pooled_projections))[:, None]}


class FluxTransformer2DModel(TwoStreams):
    """Known inputs."""


class OtherTransformer2DModel(TwoStreams):
    """Inputs that are not known."""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the name diffusers."""
    library: Any = ModuleType("diffusers")
    library.__version__, library.ModelMixin, library.shapes = "0.0", TwoStreams, "no class"
    library.FluxTransformer2DModel, library.OtherTransformer2DModel = FluxTransformer2DModel, OtherTransformer2DModel
    monkeypatch.setitem(sys.modules, "diffusers", library)


def trace(config: dict[str, Any], inputs: str | None = None) -> Any:
    """Trace two images."""
    return trace_built_model(config, inputs, source="x", batch_size=2, seq_len=1)


@pytest.mark.usefixtures("stand_in")
def test_a_denoiser_is_built_by_its_class_name() -> None:
    """Both streams run on their own tokens, in bf16; the note says who built it."""
    found = trace(FLUX)
    rows = {one.name: one.m for one in found.operations if isinstance(one, Gemm) and one.pass_name == "forward"}

    assert rows == {"image": 2 * 4096, "text": 2 * 512, "pooled": 2}
    assert (found.parameter_dtype, found.module_type) == ("bf16", "FluxTransformer2DModel")
    assert found.notes[0] == "built by diffusers 0.0 as FluxTransformer2DModel from its config"


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("OtherTransformer2DModel", "inputs of OtherTransformer2DModel are not known.*give inputs"),
        ("shapes", "has no model 'shapes'"),
        ("os.system", "has no model 'os.system'"),
    ],
)
def test_classes_that_cannot_be_traced(name: str, words: str) -> None:
    """Only models of the library are built, and only of known inputs, unless they are given."""
    with pytest.raises(TraceError, match=words):
        trace({**FLUX, "_class_name": name})


def test_without_the_library(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    """It says what to install; a sequence length has no effect on images."""
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(MissingExtraError, match="pip install 'shapewright\\[trace\\]' diffusers"):
        trace(FLUX)
    file = tmp_path / "config.json"
    file.write_text('{"_class_name": "FluxTransformer2DModel"}', encoding="utf-8")
    code, _, err = run(["predict", str(file), "--trace", "--device", "h200-sxm-141gb", "--seq-len", "64"], capsys)

    assert (code, "--seq-len has no effect on a diffusion transformer" in err) == (2, True)


@pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="needs diffusers")
@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "SD3Transformer2DModel"])
def test_models_of_diffusers(name: str) -> None:
    """Known inputs fit them; joint attention sees text and image, and all parameters have gradients."""
    sd3 = {"in_channels": 16, "sample_size": 128, "patch_size": 2, "caption_projection_dim": 64}
    found = trace({**FLUX, **(sd3 if name.startswith("SD3") else {}), "_class_name": name})
    text_len = 333 if name.startswith("SD3") else 512
    joint = {one.query_len for one in found.operations if one.kind == "attention"}

    assert joint == {4096 + text_len}
    assert found.unknown_operators == ()
    assert found.num_trainable == found.num_parameters
