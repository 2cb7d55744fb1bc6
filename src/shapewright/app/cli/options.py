"""Command-line options generated from field metadata, and those that several commands share.

CONFIG and --layout-from take files of trainers and inference engines too: their fields come below the given options.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

import click

from shapewright.app.cli.console import echo, write_text_file
from shapewright.app.cli.defaults import add_note, default_layout, read_settings, take_notes
from shapewright.app.cli.device_options import (
    Command,
    calibration_option,
    device_option,
    named_device,
    node_options,
    uncalibrated_option,
)
from shapewright.app.cli.help_pages import FINER, GroupedOption
from shapewright.app.cli.names import (
    CONFIG_FILE,
    STANDARD_INPUT,
    complete_config,
    complete_software,
    read_standard_input,
)
from shapewright.app.cli.param_types import FLAGS, INTEGERS, NAMES
from shapewright.app.report.flags import SHORT_FLAGS, flag_of
from shapewright.core.fields import documented_fields
from shapewright.core.records import dataclass

if TYPE_CHECKING:
    from shapewright.app.report.outputs.loss import ExperimentsOutput
    from shapewright.models.read import Model
    from shapewright.optimize.design.result import DesignResult
    from shapewright.optimize.search.result import SearchResult
    from shapewright.prediction.scenario import Scenario


_KEY = "shapewright.job_file"
_MOST_NAMED = 8
# Commands that choose layout and batch themselves, and the fields that they do not choose.
_CHOOSE = ("plan", "design", "serve-plan")
_NOT_CHOSEN = ("seq_len", "dtype", "weight_dtype", "kv_cache_dtype", "attention", "global_batch_size", "optimizer")


@dataclass
class _FileFields:
    """Fields that the files of a command set, and how the files count batches and replicas."""

    model: dict[str, Any] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    passes: int = 0
    guesses_replicas: bool = False
    vocab_multiple: int = 0
    without_model: str = ""  # CONFIG, where it describes no model
    run_path: str = ""


def config_argument(command: Command) -> Command:
    """Add CONFIG to a command."""
    return click.argument("config", required=False, callback=_read_config, shell_complete=complete_config)(command)


def layout_from_option(command: Command) -> Command:
    """Add --layout-from to a command."""
    return click.option(
        "--layout-from",
        metavar="FILE",
        expose_value=False,
        callback=_read_run,
        help="take workload and layout from a file of DeepSpeed, Accelerate, Megatron-LM, torchtitan, GPT-NeoX, litgpt "
        "or nanoGPT, or from a launch line of vLLM or SGLang",
    )(command)


def fields_of_files(context: click.Context | None) -> dict[str, dict[str, Any]]:
    """Fields of the files of a command, by group; the options that were given come on top of them."""
    found = context.meta.get(_KEY) if context is not None else None
    if context is None or found is None:
        return {}
    if found.run_path:
        _keep(context, found.run_path, with_model=False)
        found.run_path = ""
    taken = {parameter.name for parameter in context.command.params}
    groups: dict[str, dict[str, Any]] = {"model": found.model, "workload": found.workload, "layout": found.layout}
    if context.info_name in _CHOOSE:
        groups["layout"] = {}
        groups["workload"] = {name: value for name, value in found.workload.items() if name in _NOT_CHOSEN}
    return {
        group: {name: value for name, value in fields.items() if group == "model" or f"{group}__{name}" in taken}
        for group, fields in groups.items()
    }


def has_files(context: click.Context) -> bool:
    """Whether a command got fields from a file of a trainer or an engine."""
    return _KEY in context.meta


def _read_config(context: click.Context, _: click.Parameter, value: str | None) -> str | Model | None:
    if value in STANDARD_INPUT and not context.resilient_parsing:
        return read_standard_input()
    if value is None or not os.path.isfile(value.partition("::")[0]):  # noqa: PTH113 - takes long names
        return value
    from shapewright.app.formats.registry import is_job_file

    if not is_job_file(value):
        return value
    reading = _keep(context, value, with_model=True)
    context.meta[CONFIG_FILE] = value
    if not reading.model and not reading.fields:
        context.meta[_KEY].without_model = value
    return reading.model or None


def _read_run(context: click.Context, _: click.Parameter, value: str | None) -> None:
    if value is not None:  # read when the command runs
        context.meta.setdefault(_KEY, _FileFields()).run_path = value


def _keep(context: click.Context, path: str, *, with_model: bool) -> Any:
    from shapewright.app.formats.registry import read_job

    reading = read_job(path)
    found = context.meta.setdefault(_KEY, _FileFields())
    found.workload |= reading.workload
    found.layout |= reading.layout
    found.passes = reading.passes or found.passes
    if "data_parallel" in reading.layout:
        found.guesses_replicas = reading.guesses_replicas
    if with_model and reading.fields:
        from pathlib import Path

        found.vocab_multiple = reading.vocab_multiple
        found.model |= {"name": Path(path.partition("::")[0]).stem, **reading.fields}
    if reading.unread:
        shown = ", ".join(reading.unread[:_MOST_NAMED])
        more = f" and {len(reading.unread) - _MOST_NAMED} more" if len(reading.unread) > _MOST_NAMED else ""
        echo(f"note: read {path} as {reading.format}, without {shown}{more}", err=True)
    return reading


# Fields with aliases, whose own errors suggest close names.
_NAMES_IN_WORDS = ("dtype", "weight_dtype", "kv_cache_dtype", "optimizer")
_GROUPS = ("workload", "layout", "model")
# Fields used most; the help lists the others below them.
_COMMON = {
    "layout": {
        "tensor_parallel",
        "pipeline_parallel",
        "data_parallel",
        "context_parallel",
        "expert_parallel",
        "expert_tensor_parallel",
        "sequence_parallel",
        "zero_stage",
        "virtual_pipeline",
        "pipeline_schedule",
    },
    "workload": {
        "phase",
        "micro_batch_size",
        "seq_len",
        "context_len",
        "global_batch_size",
        "dtype",
        "weight_dtype",
        "kv_cache_dtype",
        "attention",
        "recompute",
        "optimizer",
    },
    "model": {
        "hidden_size",
        "num_layers",
        "num_heads",
        "vocab_size",
        "num_kv_heads",
        "head_dim",
        "intermediate_size",
        "max_position_embeddings",
        "gated_mlp",
        "num_experts",
        "num_experts_per_token",
        "moe_intermediate_size",
        "tied_embeddings",
    },
}
_TYPES: dict[str, Any] = {
    "int": int,
    "float": float,
    "str": str,
    "tuple[int, ...]": INTEGERS,
    "tuple[bool, ...]": FLAGS,
    "tuple[str, ...]": NAMES,
}


def question_options(command: Command) -> Command:
    """Add CONFIG, --device and every field of model, workload and layout to a command."""
    return device_option(node_options(calibration_option(job_options(command))))


def software_option(command: Command) -> Command:
    """Add --software, for commands that predict training steps."""
    return click.option(
        "--software",
        metavar="NAME",
        shell_complete=complete_software,
        help="training software: a tuned stack of today (default), or a generation such as nemo-2024, nemo-moe-2026 or "
        "fsdp-2024",
    )(command)


def job_options(command: Command) -> Command:
    """Add CONFIG, --uncalibrated and every field of model, workload and layout to a command."""
    return _add_fields(command, {})


def field_options(wanted: Mapping[str, Collection[str]], *, needs_device: bool = True) -> Callable[[Command], Command]:
    """Add CONFIG and fields to a command.

    Args:
        wanted: Names of the fields to take of a group; a group that it leaves out gives all of its fields.
        needs_device: Whether to add --uncalibrated and --layout-from too.
    """
    return lambda command: _add_fields(command, wanted, needs_device=needs_device)


def model_options(command: Command) -> Command:
    """Add CONFIG and every field of the model to a command that needs no device."""
    return _add_fields(command, {"workload": (), "layout": ()}, needs_device=False)


def _add_fields(command: Command, wanted: Mapping[str, Collection[str]], *, needs_device: bool = True) -> Command:
    for group in reversed(_GROUPS):
        names_of_group = wanted.get(group)
        if names_of_group is not None and not names_of_group:
            continue  # without importing them
        for spec, note in reversed(documented_fields(_class_of(group))):
            if (names_of_group is not None and spec.name not in names_of_group) or _has_flag(command, spec.name):
                continue
            word = str(spec.type).removesuffix(" | None")
            flag = flag_of(spec.name)
            symbol = f" [{note.symbol}]" if note.symbol else ""
            shown = f" (default: {spec.default})" if group == "layout" and spec.default is not None else ""
            keywords: dict[str, Any] = {"default": None, "help": f"{note.help}{symbol}{shown}"}
            if word == "bool":
                names = [f"{flag}/--no-{flag[2:]}"]
            else:
                names = [flag] + ([SHORT_FLAGS[spec.name]] if spec.name in SHORT_FLAGS else [])
                keywords["type"] = (
                    _TYPES[word] if not note.choices or spec.name in _NAMES_IN_WORDS else click.Choice(note.choices)
                )
            # Prefixed with the group, so that fields of model and workload cannot collide.
            heading = group if spec.name in _COMMON.get(group, (spec.name,)) else group + FINER
            option = click.option(*names, f"{group}__{spec.name}", cls=GroupedOption, group=heading, **keywords)
            command = option(command)
    if needs_device:
        command = layout_from_option(uncalibrated_option(command))
    return config_argument(command)


def _class_of(group: str) -> type:
    """The fields of a group, imported by the commands that have such options."""
    if group == "workload":
        from shapewright.workload.workload import Workload

        return Workload
    if group == "layout":
        from shapewright.workload.layout import ParallelLayout

        return ParallelLayout
    from shapewright.models.transformer import TransformerConfig

    return TransformerConfig


def _has_flag(command: Command, name: str) -> bool:
    """Whether a command defines this option itself."""
    flag = flag_of(name)
    return any(flag in parameter.opts for parameter in getattr(command, "__click_params__", ()))


def scenario_from_options(
    config: str | None, device: str, given: dict[str, Any], *, software: str | None = None
) -> Scenario:
    """Build the scenario that the options describe."""
    from shapewright.prediction.build import build_scenario

    groups = group_options(given)
    scenario = build_scenario(
        config,
        named_device(device),
        overrides=groups["model"],
        workload=groups["workload"],
        layout={**default_layout(groups["layout"]), **groups["layout"]},
        software=software,
    )
    return scenario.replace(remarks=(*take_notes(), *scenario.remarks))


def group_options(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Group the given fields into ``model``, ``workload`` and ``layout``, by field name."""
    groups: dict[str, dict[str, Any]] = {group: {} for group in _GROUPS}
    for key, value in given.items():
        group, separator, field_name = key.partition("__")
        if separator and value is not None:
            groups[group][field_name] = value
    context = click.get_current_context(silent=True)
    of_files = fields_of_files(context)
    groups = {group: of_files.get(group, {}) | fields for group, fields in groups.items()}
    return groups if context is None or not of_files else _completed(context, groups)


def _completed(context: click.Context, groups: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Groups with what follows from the fields of a file and of the command line together."""
    from shapewright.app.formats.reading import with_global_batch, with_padded_vocabulary

    found: _FileFields = context.meta[_KEY]
    if found.without_model and not groups["model"]:
        raise click.UsageError(
            f"{found.without_model} describes batch and layout, and no model; give it as --layout-from beside a model, "
            f"such as 'shapewright {context.info_name} llama-3-8b --layout-from {found.without_model}'"
        )
    layout = {**read_settings().layout, **groups["layout"]}
    model = with_padded_vocabulary(groups["model"], layout, found.vocab_multiple)
    if model != groups["model"]:
        add_note(
            f"vocab_size={groups['model']['vocab_size']} is padded to {model['vocab_size']}, as the trainer of the "
            f"file does",
            "model",
        )
    chooses = context.info_name in _CHOOSE
    is_given = context.get_parameter_source("layout__data_parallel") is click.core.ParameterSource.COMMANDLINE
    if found.guesses_replicas and "data_parallel" in groups["layout"] and not is_given:
        add_note(
            f"data_parallel={groups['layout']['data_parallel']} is assumed: the file gives the batch of a step and "
            f"of a device, and neither gradient_accumulation_steps nor the number of devices; give --data-parallel",
            "assumed",
            "data_parallel",
        )
    workload = with_global_batch(groups["workload"], layout, 0 if chooses else found.passes)
    return {**groups, "model": model, "workload": workload}


def other_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options that are no fields: those spelled as the arguments of the function of the Python API."""
    return {name: value for name, value in given.items() if "__" not in name}


def api_keywords(given: Mapping[str, Any], *, with_defaults: bool = False) -> dict[str, Any]:
    """Keywords of a function of the Python API: all options, with the fields by argument.

    Args:
        given: Values of the options.
        with_defaults: Whether the layout of pyproject.toml is meant too; not where a command chooses the layout.
    """
    groups = group_options(given)
    layout = default_layout(groups["layout"]) if with_defaults else {}
    return {
        **other_options(given),
        "workload": groups["workload"],
        "layout": {**layout, **groups["layout"]},
        "overrides": groups["model"],
    }


experiments_option = click.option(
    "--experiments",
    metavar="FILE",
    help="propose small models to train that would settle undecided shapes, and write them for 'shapewright proxy'",
)


def write_experiments(result: SearchResult | DesignResult, path: str) -> ExperimentsOutput:
    """Write the runs that would decide between the shapes; no file if none is proposed."""
    from shapewright.app.report.outputs.loss import experiments_output, runs_file
    from shapewright.optimize.experiments.propose import experiments_of

    plan = experiments_of(result)
    if plan.experiments:
        write_text_file(path, runs_file(plan))
        echo(f"wrote {path}", err=True)
    else:
        echo(f"note: {path} is not written, as no run is proposed: {plan.why_none}", err=True)
    return experiments_output(plan, path)
