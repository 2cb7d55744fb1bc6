"""write_launch: the commands that start the recommended point of a serving plan in one engine."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shapewright.app.formats.servers.flags import COMMANDS, Command, Flag, layout_problem, warnings_of
from shapewright.app.formats.servers.instance import format_key, launched_instance, read_engines
from shapewright.core.dtypes import get_dtype
from shapewright.core.errors import ConfigError, WorkloadError, close_names
from shapewright.core.records import dataclass
from shapewright.core.texts import with_fields
from shapewright.core.units import format_number_of, format_seconds
from shapewright.models.read import load_preset
from shapewright.optimize.serving.point import Instance
from shapewright.pricing.servers import kind_without

if TYPE_CHECKING:
    from shapewright.app.formats.servers.instance import Engine, LaunchedInstance, Role
    from shapewright.models.read import Model
    from shapewright.optimize.serving.plan import ServingPlan
    from shapewright.optimize.serving.point import OperatingPoint
    from shapewright.prediction.scenario import Scenario

ENGINES = ("vllm", "sglang", "trtllm")
"""Engines that launch lines can be written for."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Commands that start one engine.

    Attributes:
        engine: ``vllm``, ``sglang`` or ``trtllm``.
        version: Version that the flags are of.
        text: The commands as a shell script, with a trailing newline.
        warnings: What the engine does differently from what the plan assumes.
    """

    engine: str
    version: str
    text: str
    warnings: tuple[str, ...]


def find_engine(name: str) -> Engine:
    """Look up an engine.

    Raises:
        ConfigError: there is no such engine.
    """
    engines = read_engines()
    if name not in engines:
        hint = close_names(name, engines)
        raise ConfigError(f"unknown format {name!r}; {hint + ' ' if hint else ''}choose one of {', '.join(ENGINES)}")
    return engines[name]


def check_served(engine: Engine, scenario: Scenario) -> None:
    """Check that an engine supports a model, before a plan is made for it.

    Raises:
        ConfigError: it does not, or the model is not described by a config.json.
    """
    model_type = scenario.config.model_type
    if scenario.model.raw is None:
        raise ConfigError(
            f"format {engine.name} needs a checkpoint that {engine.title} can load, and this model is described by "
            f"flags; give a preset, a model folder or a hub id"
        )
    device = scenario.device
    if kind := kind_without(engine.name, device):
        elsewhere = " or ".join(other for other in ENGINES if not kind_without(other, device))
        raise ConfigError(
            f"{engine.title} does not run on {kind}, such as {device.name}; choose format {elsewhere}",
            field="device",
        )
    if model_type not in engine.model_types:
        others = [other.name for other in read_engines().values() if model_type in other.model_types]
        advice = f"choose format {' or '.join(others)}" if others else "serve another model"
        raise ConfigError(f"{engine.heading} does not know model_type={model_type!r}; {advice}", field="model_type")


def choose_expressible(plan: ServingPlan, engine: Engine) -> ServingPlan:
    """Keep the points of a plan whose layouts an engine can have; all of them if it can have none.

    Raises:
        WorkloadError: the devices do not carry the load with the kept points.
    """
    kept = tuple(
        point
        for point in plan.points
        if not layout_problem(engine, point.layout)
        and not (point.prefill_layout and layout_problem(engine, point.prefill_layout))
    )
    if not kept or len(kept) == len(plan.points):
        return plan
    note = (
        f"{len(plan.points) - len(kept)} of {len(plan.points)} points are left out: {engine.heading} cannot have them"
    )
    return replace(plan, points=kept, notes=(*plan.notes, note))


def write_launch(plan: ServingPlan, engine_name: str, point: OperatingPoint | None = None) -> Launch:
    """Write the commands that start an operating point of a plan.

    Args:
        engine_name: One of ENGINES.
        point: The point; None for the recommended one.

    Raises:
        ConfigError: unknown engine, or one that does not know the model.
        WorkloadError: the engine does not know the format, or no point keeps the limits.
    """
    server = plan.request.server
    engine = find_engine(engine_name).at_version_of(server)
    check_served(engine, plan.scenario)
    recommended = plan.recommended
    chosen = point or (recommended.point if recommended else None)
    if chosen is None:
        raise WorkloadError(
            f"format {engine_name}: no point keeps the limits, so there is nothing to launch",
            advice=with_fields("raise {ttft_limit_s} or {tpot_limit_s}, or give more {num_devices}"),
        )
    _check_format(engine, chosen)
    _check_adapters(engine, plan)
    model, remark = _checkpoint_of(plan.scenario.model)
    roles: list[Role] = ["both"] if chosen.prefill_layout is None else ["prefill", "decode"]
    lines = [f"# {plan.config.title}, {chosen.format.name}, on {plan.device.title}: {engine.heading}"]
    warnings = [remark] if remark else []
    for role in roles:
        layout = chosen.prefill_layout if role == "prefill" and chosen.prefill_layout else chosen.layout
        instance = Instance(plan.scenario.replace(layout=layout), chosen.format, plan.request)
        one = launched_instance(plan, chosen, instance, role, model)
        warnings += [words for words in warnings_of(engine, one) if words not in warnings]
        lines += _instance_lines(COMMANDS[engine_name](engine, one), one, *_count_words(plan, chosen, role))
    if len(roles) > 1:
        lines += _router_lines(engine, chosen)
        warnings.append("disaggregated: replace the addresses of the router with those of all instances")
    if server.name not in ("current", engine.server_name):
        warnings.append(f"the plan is priced for {server.title}, and launched in {engine.heading}")
    lines[1:1] = [f"# {_prediction_words(plan, chosen)}", *(f"# warning: {words}" for words in warnings)]
    text = "\n".join(lines) + "\n"
    return Launch(engine=engine_name, version=engine.version, text=text, warnings=tuple(warnings))


def _prediction_words(plan: ServingPlan, point: OperatingPoint) -> str:
    """What is predicted of a unit, and how many of them the devices hold."""
    devices, sequences = format_number_of(point.num_devices, "GPU"), format_number_of(point.num_sequences, "sequence")
    num_units = (plan.request.num_devices or 0) // point.num_devices
    has_fleet = plan.recommended is not None and plan.recommended.fleet is not None
    several = f"; {num_units} times that on {plan.request.num_devices}" if num_units > 1 and not has_fleet else ""
    return (
        f"predicted for {devices}: {sequences}, first token {format_seconds(point.ttft.middle_s)}, per token "
        f"{format_seconds(point.tpot.middle_s)}, {point.tokens_per_s_per_device:,.0f} tokens/s per GPU{several}"
    )


def _check_format(engine: Engine, point: OperatingPoint) -> None:
    one = point.format
    known = ", ".join(engine.formats)
    if format_key(one) not in engine.formats:
        raise WorkloadError(
            f"{engine.heading} does not know the format {one.name}; it has {known} (GEMMs:weights)", field="dtype"
        )
    cache = one.kv_cache_dtype
    if get_dtype(cache).bits < 16 and cache not in engine.cache_formats:
        known = ", ".join(engine.cache_formats)
        raise WorkloadError(
            f"{engine.heading} does not know kv_cache_dtype={cache!r}; give bf16 or {known}", field="kv_cache_dtype"
        )


def _check_adapters(engine: Engine, plan: ServingPlan) -> None:
    adapters = plan.request.adapters
    if adapters and engine.lora_ranks and adapters.rank > max(engine.lora_ranks):
        raise WorkloadError(
            f"{engine.heading} has adapters of rank {max(engine.lora_ranks)} at most, not {adapters.rank}; give a "
            f"smaller rank or choose another format",
            field="adapters",
        )


def _checkpoint_of(model: Model) -> tuple[str, str]:
    """Return the hub id or folder of a model's checkpoint, and a warning if there is none."""
    kind, _, name = model.source.partition(" ")
    if kind == "hub":
        return name.partition("@")[0], ""
    if kind == "preset":
        if hub_id := load_preset(name).hub_id:
            return hub_id, ""
        return name, f"no checkpoint of {name} is known: replace {name} with its folder or hub id"
    path = Path(model.source)
    folder = str(path.parent if path.name == "config.json" else path)
    return f"./{folder}" if folder.startswith("-") else folder, ""  # engines would take it for an option


def _count_words(plan: ServingPlan, point: OperatingPoint, role: Role) -> tuple[str, str]:
    """How often a command is started, and what for."""
    per_unit = point.num_prefill_instances if role == "prefill" else point.num_instances
    fleet = plan.recommended.fleet if plan.recommended and plan.recommended.point == point else None
    name = {"both": "instance", "prefill": "prefill instance", "decode": "decode instance"}[role]
    total = per_unit * (fleet.num_instances + fleet.num_spare_instances if fleet else 1)
    spare = f", {fleet.num_spare_instances * per_unit} spare" if fleet and fleet.num_spare_instances else ""
    return (
        f"{total} {name}s" if total > 1 else name,
        f" for {fleet.requests_per_s:g} requests/s{spare}" if fleet else "",
    )


def _instance_lines(command: Command, one: LaunchedInstance, count: str, purpose: str) -> list[str]:
    """Write the command of an instance, one flag a line, after the file that it reads."""
    nodes = f", each on {one.num_nodes} nodes" if one.num_nodes > 1 else ""
    devices = format_number_of(one.layout.num_devices, "GPU")
    lines = ["", f"# {count} of {devices}{nodes}{purpose}"]
    if one.num_nodes > 1:
        lines.append("# run on every node, with HEAD_ADDRESS, NODE_RANK or HOSTS set to your nodes")
    if command.settings:
        file = next(str(flag.value) for flag in command.flags if flag.name == "--extra_llm_api_options")
        lines += [f"cat > {file} <<'EOF'", *_yaml_lines(command.settings), "EOF"]
    words = [command.program, *(_flag_words(flag) for flag in command.flags)]
    lines += [f"{word} \\" if index < len(words) - 1 else word for index, word in enumerate(words)]
    lines[-len(words) + 1 :] = [f"  {line}" for line in lines[-len(words) + 1 :]]
    return lines


def _flag_words(flag: Flag) -> str:
    if flag.value is None:
        return flag.name
    if isinstance(flag.value, list):
        return " ".join([flag.name, *map(shlex.quote, flag.value)])
    text = str(flag.value)
    return f"{flag.name} " + (f'"{text}"' if text.startswith("$") else shlex.quote(text))


def _yaml_lines(settings: Mapping[str, object], indent: str = "") -> list[str]:
    """Write nested settings as YAML; JSON scalars are YAML scalars."""
    lines = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{key}:", *_yaml_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key}: {json.dumps(value)}")
    return lines


def _addresses(role: str, port: int, count: int) -> list[str]:
    """Return a placeholder of the address of each instance of a role."""
    names = [f"{role}_ADDRESS"] if count == 1 else [f"{role}_ADDRESS_{place + 1}" for place in range(count)]
    return [f"{name}:{port}" for name in names]


def _router_lines(engine: Engine, point: OperatingPoint) -> list[str]:
    """Write how prompts get from prefill to decode instances."""
    prefill = _addresses("PREFILL", 8100, point.num_prefill_instances)
    decode = _addresses("DECODE", 8200, point.num_instances)
    if engine.name == "sglang":
        return [
            "",
            "# the router",
            " ".join(
                [
                    "python -m sglang_router.launch_router --pd-disaggregation",
                    *(f"--prefill http://{one}" for one in prefill),
                    *(f"--decode http://{one}" for one in decode),
                ]
            ),
        ]
    if engine.name == "trtllm":
        servers = {
            "hostname": "localhost",
            "port": 8000,
            "backend": "pytorch",
            "context_servers": {"num_instances": point.num_prefill_instances, "urls": prefill},
            "generation_servers": {"num_instances": point.num_instances, "urls": decode},
        }
        lines = ["", "# the router", "cat > router.yaml <<'EOF'", *_yaml_lines(servers), "EOF"]
        return [*lines, "trtllm-serve disaggregated -c router.yaml"]
    return [
        "",
        f"# a proxy sends each prompt to http://{prefill[0]} and its answer to http://{decode[0]}; vLLM has examples "
        "of such proxies",
    ]
