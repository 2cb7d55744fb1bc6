"""Pictures of every page in light, dark and on a phone, against references that were reviewed by eye.

After an intended change, SHAPEWRIGHT_WRITE_PICTURES=1 pytest tests/explorer/test_pictures.py writes them anew.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from page_tools import IS_ANSWERED, NARROW, ONCE_MORE

Image = pytest.importorskip("PIL.Image", reason="pictures are compared with Pillow")
from PIL import ImageChops, ImageFilter

pytestmark = ONCE_MORE
FOLDER = Path(__file__).parent / "pictures"
FONTS = FOLDER / "fonts.json"
PAGES = {"shape": "sweep", "time": "operations", "memory": "memory", "plan": "plan", "serving": "serving",
         "design": "design", "devices": "devices"}  # fmt: skip
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "dark"},
    "phone": {"viewport": NARROW, "color_scheme": "light"},
}
SCALE = 0.4
NUM_COLORS = 32
# Numbers change with every calibration, and browsers draw letters differently: what is compared is blurred.
BLUR_PX = 1.5
LEAST_DIFFERENCE = 20
MOST_CHANGED_FRACTION = 0.04

# Widths of a text in the page's fonts. [px]
MEASURE_FONTS = """() => ["system-ui, sans-serif", "ui-monospace, Menlo, Consolas, monospace"].map((family) => {
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = `16px ${family}`;
  return Math.round(pen.measureText("Shapewright 0123456789").width);
})"""


def read(path: Path) -> Any:
    """A picture of a file."""
    return Image.open(io.BytesIO(path.read_bytes()))


def changed_fraction(one: Any, other: Any) -> float:
    """Share of the pixels that differ between two pictures."""
    if one.size != other.size:
        return 1.0
    blurred = [image.convert("RGB").filter(ImageFilter.GaussianBlur(BLUR_PX)) for image in (one, other)]
    bands = ImageChops.difference(*blurred).split()
    largest = ImageChops.lighter(ImageChops.lighter(bands[0], bands[1]), bands[2])
    return sum(largest.histogram()[LEAST_DIFFERENCE:]) / (largest.width * largest.height)


def photograph(page: Any, name: str) -> Any:
    """Open a page of the explorer and take its picture, as small as a reference."""
    page.click(f"#pages [data-page={name}]")
    page.mouse.move(0, 0)
    page.wait_for_function(IS_ANSWERED.replace('"canvas', '".search-form, canvas'), arg=PAGES[name], timeout=60_000)
    page.wait_for_function("() => !document.querySelector('[aria-busy]')", timeout=60_000)
    if page.viewport_size == NARROW:
        page.evaluate(f"document.getElementById('{PAGES[name]}').scrollIntoView()")
    page.wait_for_timeout(300)
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    size = (round(image.width * SCALE), round(image.height * SCALE))
    return image.resize(size, Image.Resampling.LANCZOS).quantize(NUM_COLORS, Image.Quantize.FASTOCTREE)


@pytest.mark.parametrize("look", LOOKS)
def test_pages_look_as_reviewed(look: str, open_page: Callable[..., Any]) -> None:
    """No page differs from its reference in more than a few numbers."""
    page = open_page(**LOOKS[look])
    fonts = page.evaluate(MEASURE_FONTS)
    is_writing = bool(os.environ.get("SHAPEWRIGHT_WRITE_PICTURES"))
    if is_writing:
        FOLDER.mkdir(exist_ok=True)
        FONTS.write_text(json.dumps(fonts) + "\n", encoding="utf-8")
    elif fonts != json.loads(FONTS.read_text(encoding="utf-8")):
        pytest.skip("the fonts of this machine are not those of the references")
    changed = {}
    for name in PAGES:
        image, reference = photograph(page, name), FOLDER / f"{name}-{look}.png"
        if is_writing:
            image.save(reference, optimize=True)
        fraction = changed_fraction(image, read(reference))
        if fraction > MOST_CHANGED_FRACTION:
            changed[name] = f"{100.0 * fraction:.1f} % of the pixels"

    assert changed == {}


def test_another_page_is_a_difference() -> None:
    """The comparison tells pages and colours apart, so that it can fail."""
    pictures = {path.stem: read(path) for path in FOLDER.glob("*.png")}

    assert len(pictures) == len(PAGES) * len(LOOKS)
    for look in LOOKS:
        shown = [pictures[f"{name}-{look}"] for name in PAGES]
        assert all(changed_fraction(*pair) > MOST_CHANGED_FRACTION for pair in combinations(shown, 2))
    assert changed_fraction(pictures["shape-light"], pictures["shape-light"]) == 0.0
    assert changed_fraction(pictures["shape-light"], pictures["shape-dark"]) > 0.5
