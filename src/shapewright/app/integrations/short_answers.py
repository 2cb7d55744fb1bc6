"""Short forms of the JSON outputs: the keys that answer the question, few rows, four significant digits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_ROWS = 8
"""Most entries of any list of an answer."""

Keys = Mapping[str, "Keys | None"]
"""Keys to keep; the value selects keys of the value, or of every entry of a list of objects; None keeps it as it is."""

_STEP: Keys = dict.fromkeys(("step_time_s", "step_time_low_s", "step_time_high_s", "mfu", "tokens_per_s_per_device"))
_CHANGES: Keys = dict.fromkeys(("title", "changes", "kind", "predicted_gain_fraction", "parameters_change_fraction"))
_VERDICT: Keys = dict.fromkeys(
    ("code", "text", "changes", "net_speedup", "net_speedup_low", "net_speedup_high", "chance_better")
)
_POINT: Keys = dict.fromkeys(
    (
        *("format", "mode", "instances", "num_devices", "batch_size", "ttft_s", "ttft_high_s", "tpot_s", "tpot_high_s"),
        *("requests_per_s", "tokens_per_s_per_device", "usd_per_million_tokens"),
    )
)
_PLAN: Keys = {
    **dict.fromkeys(("plan", "micro_batch_size", "recompute")),
    **_STEP,
    **dict.fromkeys(("total_bytes", "tight", "usd_per_million_tokens")),
}
_NOTES: Keys = dict.fromkeys(("problem", "warnings", "notes", "is_complete"))

KEYS: dict[str, Keys] = {
    "predict": {
        **_STEP,
        "tokens_per_step": None,
        "memory": dict.fromkeys(("total_bytes", "capacity_bytes", "fits")),
        "parameters": {"total": None, "active": None},
        "slowest_operations": dict.fromkeys(("name", "pass", "shape", "total_time_s", "bound_by")),
        **_NOTES,
    },
    "check": {
        "step_time_s": None,
        "findings": {
            **dict.fromkeys(("code", "severity", "field", "message", "cost_s", "cost_fraction")),
            "suggestions": _CHANGES,
        },
        "combined_fix": None,
        "better_shapes": dict.fromkeys(("title", "changes", "speedup", "net_speedup", "parameters_change_fraction")),
        **_NOTES,
    },
    "search": {
        "verdict": _VERDICT,
        "objective": None,
        "candidates": dict.fromkeys(
            ("changes", "speedup", "speedup_low", "speedup_high", "net_speedup", "parameters_change")
        ),
        "space": dict.fromkeys(("size", "priced", "faster", "faster_but_too_large")),
        **_NOTES,
    },
    "design": {
        "verdict": _VERDICT,
        "designs": {
            **dict.fromkeys(("rank", "is_baseline", "parameters", "changes", "net_speedup", "why")),
            "plan": _PLAN,
            "run": {"train_tokens": None, "num_steps": None, "hours": None},
        },
        "config_json": None,
        **_NOTES,
    },
    "plan": {
        "plans": {"rank": None, **_PLAN, "loss": {"text": None}},
        "space": {"size": None, "priced": None},
        **_NOTES,
    },
    "serve_plan": {
        "keeps_limits": None,
        "best": _POINT,
        "best_by_format": _POINT,
        "shortest_ttft_s": None,
        "shortest_tpot_s": None,
        **_NOTES,
    },
}
"""Keys of the outputs that are kept, by tool."""


def shorten(tool: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the keys of a tool's answer that KEYS names, without nulls and empty lists.

    Args:
        tool: A key of KEYS.

    >>> shorten("plan", {"plans": [{"rank": 1, "mfu": 0.51239, "layout": {}}], "elapsed_s": 3.0, "notes": []})
    {'plans': [{'rank': 1, 'mfu': 0.5124}]}
    """
    kept = _keep(answer, KEYS[tool])
    assert isinstance(kept, dict)
    return kept


def _keep(value: Any, keys: Keys | None) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        inner = {name: _keep(part, _keys_of(keys, name)) for name, part in value.items() if _is_kept(keys, value, name)}
        return {name: part for name, part in inner.items() if part is not None and part not in ([], {}, "")}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_keep(part, keys) for part in value[:MAX_ROWS]]
    return value


def _is_kept(keys: Keys | None, value: Mapping[str, Any], name: str) -> bool:
    """Whether a key is selected; objects by name, such as the best point of each format, keep all their names."""
    return keys is None or name in keys or not any(key in keys for key in value)


def _keys_of(keys: Keys | None, name: str) -> Keys | None:
    return keys if keys is None or name not in keys else keys[name]
