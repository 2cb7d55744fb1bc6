"""Model presets as a table."""

from __future__ import annotations

from shapewright.app.report.columns import Column, columns_of
from shapewright.core.errors import UnknownModelError, close_names
from shapewright.core.units import format_count
from shapewright.models import count_parameters, list_presets, load_preset, read_model

# Letters as in docs/notation.md.
_COLUMNS = (
    Column("name", is_text=True),
    Column("title", rank=5, is_text=True),
    Column("type", rank=4, is_text=True),
    Column("parameters"),
    Column("L", rank=1),
    Column("h", rank=1),
    Column("a", rank=1),
    Column("a_kv", rank=1),
    Column("d", rank=1),
    Column("f", rank=1),
    Column("v", rank=2),
    Column("experts", rank=3),
    Column("positions", rank=6),
)


def select_presets(pattern: str | None) -> list[str]:
    """List preset names that contain a pattern.

    Raises:
        UnknownModelError: no name contains it.
    """
    names = [name for name in list_presets() if pattern is None or pattern.casefold() in name]
    if not names:
        hint = close_names(pattern or "", list_presets()) or "list all with 'shapewright models'"
        raise UnknownModelError(f"no preset has {pattern!r} in its name; {hint}")
    return names


def model_columns(pattern: str | None) -> list[Column]:
    """Presets, one row each, as the columns of a table."""
    return columns_of((_row(name) for name in select_presets(pattern)), _COLUMNS)


def _row(name: str) -> list[str]:
    config = read_model(name).config
    return [
        name,
        load_preset(name).title,
        config.model_type,
        format_count(count_parameters(config).total),
        str(config.num_layers),
        str(config.hidden_size),
        str(config.num_heads),
        str(config.num_kv_heads),
        str(config.head_dim),
        str(config.intermediate_size),
        str(config.vocab_size),
        f"{config.num_experts}/{config.num_experts_per_token}" if config.num_experts else "",
        str(config.max_position_embeddings),
    ]
