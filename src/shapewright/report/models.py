"""Model presets as tables and JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shapewright.config import count_parameters, list_presets, load_preset, read_model
from shapewright.errors import UnknownModelError, close_names
from shapewright.report.prediction_json import SCHEMA_VERSION
from shapewright.units import format_count

if TYPE_CHECKING:
    from rich.table import Table


def select_presets(pattern: str | None) -> list[str]:
    """Names that hold the pattern.

    Raises:
        UnknownModelError: none does.
    """
    names = [name for name in list_presets() if pattern is None or pattern.casefold() in name]
    if not names:
        hint = close_names(pattern or "", list_presets()) or "list all with 'shapewright models'"
        raise UnknownModelError(f"no preset has {pattern!r} in its name; {hint}")
    return names


def models_table(pattern: str | None) -> Table:
    """Presets, one row each."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("name", "title", "type"):
        table.add_column(name, overflow="fold")
    for name in ("parameters", "L", "h", "a", "a_kv", "d", "f", "v", "experts", "positions"):
        table.add_column(name, justify="right")
    for name in select_presets(pattern):
        config = read_model(name).config
        counts = [
            config.num_layers,
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.intermediate_size,
            config.vocab_size,
        ]
        experts = f"{config.num_experts}/{config.num_experts_per_token}" if config.num_experts else ""
        total = format_count(count_parameters(config).total)
        table.add_row(
            name,
            load_preset(name).title,
            config.model_type,
            total,
            *map(str, counts),
            experts,
            str(config.max_position_embeddings),
        )
    return table


def models_to_json(pattern: str | None) -> dict[str, Any]:
    """Presets with their configs."""
    entries = []
    for name in select_presets(pattern):
        preset, config = load_preset(name), read_model(name).config
        entries.append(
            {
                "name": name,
                "title": preset.title,
                "source": preset.source,
                "parameters": count_parameters(config).total,
                "config": asdict(config),
            }
        )
    return {"schema_version": SCHEMA_VERSION, "models": entries}
