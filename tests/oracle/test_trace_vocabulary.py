"""Linear layers of traced modules whose outputs are tokens or classes: they may be padded, but nothing is left out."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="tracing needs the trace extra (torch)")

import shapewright
from shapewright.hardware.loader import load_device

pytestmark = pytest.mark.oracle

WIDTH, VOCAB, ROWS = 256, 10007, 4096


class Head(torch.nn.Module):
    """An embedding and a last layer, whose loss is that of the tokens where it has one."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.table = torch.nn.Embedding(256 if way == "scored" else VOCAB, WIDTH)
        self.middle = torch.nn.Linear(WIDTH, WIDTH)
        self.last = torch.nn.Linear(WIDTH, VOCAB, bias=False)
        if way == "tied":
            self.last.weight = self.table.weight

    def forward(self, tokens: Any) -> Any:
        """Logits, or the loss of the capped ones."""
        if self.way == "no vocabulary":
            return self.last(self.middle(self.table.weight[:ROWS]))
        logits = self.last(self.middle(self.table(tokens)))
        capped = 30.0 * torch.tanh(logits.float() / 30.0)
        return torch.nn.functional.cross_entropy(capped, tokens) if self.way == "scored" else logits


@pytest.mark.parametrize("way", ["tied", "scored", "as many rows"])
def test_a_vocabulary_is_only_padded(way: str) -> None:
    """A tied weight, cross entropy of the outputs, or a table with as many rows: no smaller width is suggested."""
    trace = shapewright.trace(Head(way), f"tokens=int64[{ROWS}]", dtype="bf16")
    (found,) = shapewright.check(trace, device=load_device("h100-sxm-80gb")).findings

    assert (found.code, [(one.title, one.kind) for one in found.suggestions]) == (
        "TC101", [("use out_features=10048", "exact")],
    )  # fmt: skip


def test_a_wide_layer_is_no_vocabulary() -> None:
    """Without a sign of tokens, a width of thousands is one like others."""
    trace = shapewright.trace(Head("no vocabulary"), f"tokens=int64[{ROWS}]", dtype="bf16")
    (found,) = shapewright.check(trace, device=load_device("h100-sxm-80gb")).findings

    assert (found.code, {one.kind for one in found.suggestions}) == ("TC105", {"retrain"})
    assert {one.title for one in found.suggestions} == {"use out_features=10048", "use out_features=9984"}
