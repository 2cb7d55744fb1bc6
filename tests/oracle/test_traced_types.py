"""A sample of the causal types of transformers: each gives a prediction, or the reason that the page states.

Another sample: ``SHAPEWRIGHT_SAMPLE=7 pytest tests/oracle/test_traced_types.py``.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
CELLS = dict(re.findall(r"^\| `([\w-]+)` \| (.*) \|$", PAGE, re.MULTILINE))
NUM_TYPES = 4

pytest.importorskip("torch", reason="tracing needs the trace extra (torch)")
transformers = pytest.importorskip("transformers", reason="tracing configs needs the trace extra (transformers)")


def load_script() -> Any:
    """The script that writes the page."""
    spec = importlib.util.spec_from_file_location("write_traced_types", ROOT / "scripts" / "write_traced_types.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sample() -> list[str]:
    """Types of the page: of those traced, of those with a reason."""
    chosen = random.Random(os.environ.get("SHAPEWRIGHT_SAMPLE", "0"))
    traced = sorted(name for name, cells in CELLS.items() if " | yes" in cells)
    others = sorted(set(CELLS) - set(traced))
    return [*chosen.sample(traced, NUM_TYPES - 1), *chosen.sample(others, 1)]


@pytest.mark.skipif(
    f"transformers {getattr(transformers, '__version__', '')}" not in PAGE, reason="the page is of another release"
)
@pytest.mark.parametrize("model_type", sample())
def test_a_type_gives_what_the_page_states(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config is read, its model traced and priced, or the reason is the same."""
    script = load_script()
    monkeypatch.setattr(script.logging, "disable", lambda _: None)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")

    assert script.describe(model_type) == (model_type, CELLS[model_type])
