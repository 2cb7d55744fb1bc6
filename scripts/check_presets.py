"""Build every preset with transformers on the meta device and compare parameter counts with the preset's.

    python scripts/check_presets.py [NAME ...]

Needs the ``trace`` extra, no network and no weights. Exit code 1 when a count differs.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from pathlib import Path
from typing import Any

PRESETS = Path(__file__).parent.parent / "src" / "shapewright" / "models" / "presets"


def load_presets(names: list[str]) -> dict[str, dict[str, Any]]:
    """Read the named presets, or all, as they are written.

    Raises:
        SystemExit: a name that is no preset.
    """
    known = {path.stem: path for path in sorted(PRESETS.glob("*.toml"))}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no such preset: {', '.join(unknown)}; the names are those of the files in {PRESETS}")
    return {name: tomllib.loads(known[name].read_text("utf-8")) for name in names or known}


def count_in_transformers(config: dict[str, Any]) -> int:
    """Count the parameters of the model with its language head that transformers builds, tied ones once."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    # TOML has no null: a rank of 0 says that queries are not compressed, a window of 0 that there is none.
    values: dict[str, Any] = {
        key: None if key in ("q_lora_rank", "sliding_window") and value == 0 else value for key, value in config.items()
    }
    resolved = AutoConfig.for_model(values.pop("model_type"), **values)
    builder: Any = AutoModelForSeq2SeqLM if resolved.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        model = builder.from_config(resolved)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> int:
    """Print a line per preset; return 1 when a count differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="presets; default: all")
    names = parser.parse_args().names
    from transformers import logging

    set_quiet: Any = logging.set_verbosity_error
    set_quiet()
    num_wrong = 0
    for name, preset in load_presets(names).items():
        if {"patch_size", "vision_config"} & preset["config"].keys():  # tests/oracle/test_images.py compares these
            continue
        built = count_in_transformers(preset["config"])
        difference = built - preset.get("parameters", built)
        num_wrong += difference != 0
        verdict = f"DIFFERS by {difference:+,}" if difference else "same"
        print(f"{name:20} {preset['config']['model_type']:12} {built:>18,}  {verdict}")
    print(f"{num_wrong} differ", file=sys.stderr)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
