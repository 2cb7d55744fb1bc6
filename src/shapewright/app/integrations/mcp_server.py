"""MCP server: the commands as tools for coding agents, over standard input and output.

A model is a preset, the content of a config.json, fields alone, or, where the user allows it, a file under a folder or
a hub id. Devices are known by name. Every call has a time limit, one runs at a time, and answers are short.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import Tool, ToolAnnotations
from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import ErrorDetails

from shapewright import __version__
from shapewright.app.api import designs, searches, serving
from shapewright.app.integrations.mcp_inputs import (
    NO_FIELDS,
    Access,
    Fields,
    LayoutFields,
    ModelFields,
    WorkloadFields,
    place_of_field,
    read_count,
)
from shapewright.app.report.outputs.check import check_output
from shapewright.app.report.outputs.design import design_output
from shapewright.app.report.outputs.plan import plans_output
from shapewright.app.report.outputs.predict import predict_output
from shapewright.app.report.outputs.search import search_output
from shapewright.app.report.outputs.serving import serve_plan_output
from shapewright.app.report.predict import describe
from shapewright.core.deadline import Deadline, check_deadline
from shapewright.core.errors import ShapewrightError, UnknownDeviceError, close_names, short_repr
from shapewright.core.units import format_number_of, format_percent, format_seconds
from shapewright.hardware.device import Device
from shapewright.hardware.loader import list_devices, load_named_device, note_on_board
from shapewright.lint.check import check_scenario
from shapewright.optimize.plan.request import LARGEST_JOB
from shapewright.prediction.build import build_scenario
from shapewright.pricing.software import TUNED

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
        "plans": {"rank": None, **_PLAN, "loss": dict.fromkeys(("part", "slower_by_s"))},
        "space": {"size": None, "priced": None},
        **_NOTES,
    },
    "serve_plan": {
        "keeps_limits": None,
        "recommended": _POINT,
        "recommended_reason": None,
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


_SLOWEST_SHOWN = 5

_INSTRUCTIONS = (
    "Predicts time, memory and MFU of transformers on accelerators, lints their shapes, and finds better shapes, "
    "training layouts and serving plans. Start with check on a config and a device. Times are in seconds, sizes in "
    "bytes, *_fraction from 0 to 1; *_low and *_high are ends of 90 % intervals."
)
_Config = Annotated[
    str | dict[str, Any] | None,
    Field(
        description="preset such as llama-3-8b, or a config.json object; a path or hub id only where the user allowed "
        "it; omitted if `model` gives the whole model"
    ),
]
_Device = Annotated[str, Field(description="device name, such as h100-sxm-80gb", max_length=200)]
_Model = Annotated[ModelFields, Field(description="fields of the model to change, or the whole model")]
_Workload = Annotated[WorkloadFields, Field(description="phase, batch, lengths and format")]
_Layout = Annotated[LayoutFields, Field(description="parallel degrees")]
_Software = Annotated[str, Field(description="generation of the training software, such as fsdp-2024", max_length=60)]
_Count = Annotated[int, Field(ge=1, le=LARGEST_JOB)]
_Large = Annotated[float, Field(gt=0.0, le=1e18, allow_inf_nan=False)]
_Amount = Annotated[_Large, BeforeValidator(read_count)]
_Top = Annotated[int, Field(ge=1, le=20)]
_Length = Annotated[int, Field(ge=0, le=2**24)]
_Answer = dict[str, Any]


class _Server(MCPServer):  # type: ignore[misc]
    """A server that refuses arguments which its tools lack, where the SDK ignores them."""

    async def list_tools(self) -> list[Tool]:
        """Tools, whose schemas say that they have no other arguments."""
        tools: list[Tool] = await super().list_tools()
        for tool in tools:
            tool.input_schema["additionalProperties"] = False
        return tools

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
        """Call a tool.

        Raises:
            ToolError: an argument is unknown, missing or invalid; the message says where it belongs.
        """
        known = {tool.name: tool.input_schema["properties"] for tool in await self.list_tools()}.get(name, arguments)
        for unknown in (given for given in arguments if given not in known):
            place = place_of_field(unknown)
            advice = f"give it inside `{place}`" if place in known else close_names(unknown, known)
            raise ToolError(f"unknown argument {short_repr(unknown)}; {advice or 'allowed: ' + ', '.join(known)}")
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            if isinstance(error.__cause__, ValidationError):
                raise ToolError("; ".join(map(_describe_invalid, error.__cause__.errors()[:MAX_ROWS]))) from None
            raise


def _describe_invalid(found: ErrorDetails) -> str:
    """One argument that is missing or of a wrong type."""
    name = ".".join(map(str, found["loc"]))
    if found["type"] == "missing":
        return f"{name} is missing"
    return f"{name}={short_repr(found['input'])}: {found['msg']}"


def make_server(access: Access) -> MCPServer:
    """Make the server with its tools.

    Args:
        access: What it may read, and the time limit of a call.
    """
    server = _Server("shapewright", version=__version__, instructions=_INSTRUCTIONS, log_level="ERROR")
    turn = threading.Lock()

    def answered(compute: Callable[..., _Answer]) -> Callable[..., _Answer]:
        """Run a tool within the time limit; errors of the user's input become those of the tool."""

        @functools.wraps(compute)
        def tool(*values: Any, **given: Any) -> _Answer:
            try:
                with turn, Deadline(access.limit_s).running():
                    found = compute(*values, **given)
                board = note_on_board(given["device"])
                found["notes"] = [*([board] if board else []), *found.get("notes", ())]
                return {"answer": found["answer"], **shorten(compute.__name__, found)}
            except ShapewrightError as error:
                raise ToolError(str(error)) from None

        return tool

    for compute in _tools(access):
        hints = ToolAnnotations(read_only_hint=True, open_world_hint=access.allows_hub)
        server.add_tool(answered(compute), annotations=hints)
    return server


def _load_device(name: str) -> Device:
    """Load a device of the package.

    Raises:
        UnknownDeviceError: there is none of this name; the message has all names, as no tool lists them.
    """
    try:
        return load_named_device(name)
    except UnknownDeviceError:
        names = list_devices()
        hint = close_names(name, names)
        raise UnknownDeviceError(
            f"unknown device {short_repr(name)}; {f'{hint} ' if hint else ''}devices: {', '.join(names)}"
        ) from None


def _check_progress(_done: int, _num: int) -> None:
    check_deadline()


def _tools(access: Access) -> Sequence[Callable[..., _Answer]]:
    """The tools; their docstrings and annotations are what an agent reads."""

    def parts(device: str, workload: Fields, layout: Fields, software: str) -> dict[str, Any]:
        return {
            "device": _load_device(device),
            "workload": workload.given(),
            "layout": layout.given(),
            "software": software,
        }

    def predict(
        device: _Device,
        config: _Config = None,
        model: _Model = NO_FIELDS,
        workload: _Workload = NO_FIELDS,
        layout: _Layout = NO_FIELDS,
        software: _Software = TUNED,
    ) -> _Answer:
        """Predict time, throughput, MFU and memory of one training, prefill or decode step on a device."""
        source = access.read(config, model.given())
        scenario = build_scenario(source, **parts(device, workload, layout, software))
        found = scenario.predict()
        output = predict_output(found, scenario)
        answer = output.to_json()
        ranked = sorted(answer["operations"], key=lambda entry: -entry["total_time_s"])
        return {
            "answer": f"{describe(output)}: {format_seconds(found.step_time_s)}, MFU {format_percent(found.mfu)}",
            **answer,
            "slowest_operations": ranked[:_SLOWEST_SHOWN],
        }

    def check(
        device: _Device,
        config: _Config = None,
        model: _Model = NO_FIELDS,
        workload: _Workload = NO_FIELDS,
        layout: _Layout = NO_FIELDS,
        software: _Software = TUNED,
        ignore: Annotated[list[str] | None, Field(description="rules to ignore, such as TC101", max_length=32)] = None,
    ) -> _Answer:
        """Lint a model's shape on a device: what is slow, what it costs, what to use instead, nearest better shapes."""
        source = access.read(config, model.given())
        scenario = build_scenario(source, **parts(device, workload, layout, software))
        report = check_scenario(scenario, ignore=ignore or ())
        codes = ", ".join(dict.fromkeys(finding.code for finding in report.findings))
        return {
            "answer": f"{format_number_of(len(report.findings), 'finding')}{f': {codes}' if codes else ''}",
            **check_output(report, scenario).to_json(),
        }

    def search(
        device: _Device,
        config: _Config = None,
        model: _Model = NO_FIELDS,
        workload: _Workload = NO_FIELDS,
        layout: _Layout = NO_FIELDS,
        software: _Software = TUNED,
        num_parameters: Annotated[_Amount | None, Field(description="scale the model to this size first")] = None,
        train_tokens: Annotated[_Amount | None, Field(description="tokens of the run, to compare losses at")] = None,
        vary: Annotated[list[str] | None, Field(description="fields to vary, or the usual ones", max_length=16)] = None,
        keep: Annotated[dict[str, int] | None, Field(description="values that fields must have")] = None,
        top: _Top = 5,
    ) -> _Answer:
        """Find shapes of the same size that reach the same loss sooner, or run faster, with a verdict."""
        found = searches.search(
            access.read(config, model.given()) if config is not None or model.given() else None,
            num_parameters=None if num_parameters is None else int(num_parameters),
            train_tokens=train_tokens,
            vary=vary or (),
            keep=keep,
            top=top,
            progress=_check_progress,
            **parts(device, workload, layout, software),
        )
        answer = search_output(found).to_json()
        return {"answer": (answer["verdict"] or {}).get("text", ""), **answer}

    def design(
        device: _Device,
        num_devices: _Count,
        num_parameters: Annotated[
            _Amount | None, Field(description="parameters, such as 3e9; omitted: for the budget")
        ] = None,
        train_tokens: Annotated[_Amount | None, Field(description="tokens; omitted: for the budget")] = None,
        hours: Annotated[_Large | None, Field(description="budget: hours that the job may take")] = None,
        family: Annotated[str | None, Field(description="such as llama or qwen3", max_length=60)] = None,
        seq_len: Annotated[int | None, Field(ge=1, le=2**24)] = None,
        top: _Top = 3,
    ) -> _Answer:
        """Design a model and its run for a size and tokens, or for a budget: shape, plan, time and config.json."""
        found = designs.design(
            device=_load_device(device),
            num_devices=num_devices,
            num_parameters=None if num_parameters is None else int(num_parameters),
            train_tokens=None if train_tokens is None else int(train_tokens),
            hours=hours,
            family=family,
            workload={} if seq_len is None else {"seq_len": seq_len},
            top=top,
            progress=_check_progress,
        )
        answer = design_output(found).to_json()
        return {"answer": answer["verdict"]["text"], **answer}

    def plan(
        device: _Device,
        num_devices: _Count,
        global_batch_size: Annotated[int, Field(ge=1, le=2**30, description="sequences of one optimizer step")],
        config: _Config = None,
        model: _Model = NO_FIELDS,
        workload: _Workload = NO_FIELDS,
        layout: _Layout = NO_FIELDS,
        software: _Software = TUNED,
        objective: Literal["time", "cost", "memory"] = "time",
        usd_per_hour: _Large | None = None,
        top: _Top = 3,
    ) -> _Answer:
        """Plan a training job: parallel degrees, micro-batch, recomputation and ZeRO stage; given fields are kept."""
        found = searches.plan(
            access.read(config, model.given()),
            num_devices=num_devices,
            global_batch_size=global_batch_size,
            objective=objective,
            usd_per_hour=usd_per_hour,
            top=top,
            progress=_check_progress,
            **parts(device, workload, layout, software),
        )
        answer = plans_output(found).to_json()
        best = answer["plans"][0]
        return {"answer": f"{best['plan']}: {format_seconds(best['step_time_s'])} a step", **answer}

    def serve_plan(
        device: _Device,
        prompt_len: Annotated[int, Field(ge=1, le=2**24, description="tokens of a prompt")],
        output_len: Annotated[int, Field(ge=1, le=2**24, description="tokens of an answer")],
        config: _Config = None,
        model: _Model = NO_FIELDS,
        workload: _Workload = NO_FIELDS,
        layout: _Layout = NO_FIELDS,
        cached_len: Annotated[_Length, Field(description="prompt tokens that are in the cache already")] = 0,
        ttft_limit_s: _Large | None = None,
        tpot_limit_s: _Large | None = None,
        num_devices: _Count | None = None,
        usd_per_hour: _Large | None = None,
    ) -> _Answer:
        """Plan serving: layout, batch, format, time to first token and per token, tokens per second and dollar."""
        found = serving.serve_plan(
            access.read(config, model.given()),
            prompt_len=prompt_len,
            output_len=output_len,
            cached_len=cached_len,
            ttft_limit_s=ttft_limit_s,
            tpot_limit_s=tpot_limit_s,
            num_devices=num_devices,
            usd_per_hour=usd_per_hour,
            device=_load_device(device),
            workload=workload.given(),
            layout=layout.given(),
        )
        answer = serve_plan_output(found).to_json()
        point = answer["recommended"]
        words = "no way to serve keeps the limits"
        if point is not None:
            words = (
                f"{point['instances']}, batch {point['batch_size']}: first token {format_seconds(point['ttft_s'])}, "
                f"per token {format_seconds(point['tpot_s'])}, {point['tokens_per_s_per_device']:,.0f} tokens/s each"
            )
        return {"answer": words, **answer}

    return (check, predict, search, design, plan, serve_plan)
