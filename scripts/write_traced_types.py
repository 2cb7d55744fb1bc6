"""Write which architectures of transformers can be predicted: read from their config, traced, or why not.

    python scripts/write_traced_types.py [MODEL_TYPE...]

Every type with a causal language head is built from the default config of transformers, with four layers if it can have
so few, and its training step of 128 tokens is traced on the meta device and priced on an H200. The page holds the
result by type.
Types run in chunks, each in a process of its own; all of them take half an hour on two cores. Given types are replaced
in the page.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from shapewright.core.errors import ShapewrightError, first_line

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers")
FEW_LAYERS, SEQ_LEN = 4, 128
TYPES_PER_PROCESS, NUM_PROCESSES = 8, 2
DEVICE = "h200-sxm-141gb"
_ROW = re.compile(r"^\| `([\w-]+)` \| (.*) \|$", re.MULTILINE)


def causal_types() -> list[str]:
    """Model types with a causal language head."""
    from transformers.models.auto import modeling_auto

    return sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def describe(model_type: str) -> tuple[str, str]:
    """Cells of a type: whether its config is read, and what its trace gives."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    cells = ""
    for most_layers in (FEW_LAYERS, 10**6):
        try:
            values = default_config(model_type, most_layers)
        except Exception as error:
            cells = f"no | transformers cannot make a default config: {_cell(first_line(error))}"
            continue
        cells = f"{_read(values)} | {_trace(values)}"
        if " | yes" in cells:
            break
    return model_type, cells


def default_config(model_type: str, most_layers: int) -> dict[str, Any]:
    """config.json object that transformers has by default, with few layers."""
    from transformers import AutoConfig

    filled = AutoConfig.for_model(model_type).to_dict()
    few = {key: most_layers for key in LAYER_KEYS if isinstance(filled.get(key), int) and filled[key] > most_layers}
    values = AutoConfig.for_model(model_type, **few).to_dict()
    # A value of None would replace one that transformers derives.
    return {key: value for key, value in values.items() if value is not None} | {"model_type": model_type}


def _read(values: dict[str, Any]) -> str:
    from shapewright.models.hf_config import read_hf_config

    try:
        read_hf_config(json.loads(json.dumps(values, default=str)))
    except ShapewrightError:
        return "no"
    return "yes"


def _trace(values: dict[str, Any]) -> str:
    from shapewright.hardware.loader import load_device
    from shapewright.lowering.torch_trace.huggingface import trace_built_model
    from shapewright.prediction.traced import predict_trace

    try:
        trace = trace_built_model(values, source=values["model_type"], batch_size=1, seq_len=SEQ_LEN)
        prediction = predict_trace(trace, load_device(DEVICE))
    except ShapewrightError as error:
        return _cell(error.fact)
    except Exception as error:
        return _cell(first_line(error))
    unknown = f", unknown: {', '.join(one.name for one in trace.unknown_operators)}" if trace.unknown_operators else ""
    return f"yes, {prediction.model_flops / 1e12:.3g} TFLOP{unknown}"


def _cell(text: str) -> str:
    return text.replace("|", "/")[:160]


def main() -> None:
    """Trace the given types, or all, and write the page."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="MODEL_TYPE", choices=[*causal_types(), []])
    known = dict(_ROW.findall(PAGE.read_text(encoding="utf-8"))) if PAGE.is_file() else {}
    types = parser.parse_args().types or causal_types()
    chunks = [types[start : start + TYPES_PER_PROCESS] for start in range(0, len(types), TYPES_PER_PROCESS)]
    for start in range(0, len(chunks), NUM_PROCESSES):
        wave = chunks[start : start + NUM_PROCESSES]
        with ProcessPoolExecutor(NUM_PROCESSES) as pool:
            for found in pool.map(describe_all, wave):
                known |= found
        write_page(known, transformers.__version__)


def describe_all(types: list[str]) -> dict[str, str]:
    """Cells of several types, in one process."""
    return dict(map(describe, types))


def write_page(known: dict[str, str], version: str) -> None:
    """Write the page of all types."""
    traced = sum(cells.partition(" | ")[2].startswith("yes") for cells in known.values())
    read = sum(cells.startswith("yes") for cells in known.values())
    head = f"""# Architectures

Written by `scripts/write_traced_types.py`: {len(known)} types with a causal language head of transformers {version},
in their default configs with {FEW_LAYERS} layers, or all of them where the type needs them. {read} are read from their
config, which gives layouts, serving and search; {traced} are predicted with
[`--trace`](guides/trace-a-module.md), which builds the model with transformers. The FLOPs are those of a training step
of {SEQ_LEN} tokens; where there are none, the reason is given.

| model_type | config read | traced |
| --- | --- | --- |
"""
    rows = "".join(f"| `{name}` | {cells} |\n" for name, cells in sorted(known.items()))
    PAGE.write_text(head + rows, encoding="utf-8")


if __name__ == "__main__":
    main()
