"""Measure all presets for the quality guard of search, and write the result into the package."""

from __future__ import annotations

import json

from shapewright.optimize.search.space.guard import PRESET_MEASURES, measure_presets

if __name__ == "__main__":
    lines = [f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in measure_presets().items()]
    PRESET_MEASURES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
