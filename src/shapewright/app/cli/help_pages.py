"""Help pages, where --help fits one screen and --help-all lists every option, and the next command after a text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Mapping
from typing import Any

import click

from shapewright.app.cli.console import echo
from shapewright.app.cli.defaults import explain_defaults, take_notes
from shapewright.app.cli.names import CONFIG_FILE
from shapewright.app.report.flags import with_flags
from shapewright.core.errors import ShapewrightError

SCREEN_LINES = 40
"""Lines of a page of --help, at most."""

FINER = ", advanced"
"""Ending of the headings of fields that are seldom set."""

_MOST_EXAMPLES = 3
_MOST_NAME_LINES = 5  # of the paragraph that only names options
_FLAGS_WIDTH = 28
_TYPED = "shapewright.typed"  # key of the words that were typed, in a context's meta
# Ends of what can stand alone, and commas, behind which a list or a sentence goes on; neither inside of parentheses.
_CLAUSE_END = re.compile(r"; (?![^(]*\)|[^[]*\])| [(\[]")
_COMMA = re.compile(r", (?![^(]*\)|[^[]*\])")
_MORE = " ..."
# Options of many commands that few calls need; a short page only names them.
_SELDOM_USED = """
    --help --help-all --calibration --physics-only --uncalibrated --node-size --network-gbit-per-s --loss-law --software
    --engine --address --verify --verify-budget --experiments --usd-per-hour --straggler-factor
"""
# Options of a job that most calls need; a short page explains them before those above.
_OFTEN_USED = "--micro-batch-size --seq-len --dtype --tp"
_TITLES = {
    "": "Options",
    "traffic": "Traffic (simulated requests)",
    "workload": "Workload",
    "layout": "Layout",
    "model": "Model (alone, or on top of CONFIG)",
    f"workload{FINER}": f"Workload{FINER}",
    f"layout{FINER}": f"Layout{FINER}",
    f"model{FINER}": f"Model{FINER}",
    "trace": "PyTorch module (CONFIG is FILE.py:CALLABLE, or --trace)",
}


class GroupedOption(click.Option):
    """An option listed under a heading of the help."""

    def __init__(self, *args: Any, group: str, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.group = group


class GuidedCommand(click.Command):
    """A command that names the next useful one where it printed text."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the words that were typed, for a next command that repeats them."""
        ctx.meta[_TYPED] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, then print the notes that its output had no place for, and the next one."""
        try:
            code = super().invoke(ctx)
        except ShapewrightError as error:
            explain_defaults(error)
            raise
        for note in take_notes():
            echo(f"note: {with_flags(note)}", err=True)
        line = describe_next(ctx, is_met=not code)
        if line:
            echo(line)
        return code


class GroupedCommand(GuidedCommand):
    """A command with a short help page, and one of all options under headings."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, with --help-all beside --help."""

        def show(context: click.Context, _: click.Parameter, value: bool) -> None:
            if value and not context.resilient_parsing:
                click.echo(self._whole_page(context).rstrip("\n"), color=context.color)
                context.exit()

        words = "Show every option and example and exit."
        option = click.Option(
            ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=show, help=words
        )
        return [*super().get_params(ctx), option]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write general options first, then each group; CONFIG is explained in the text above."""
        rows: dict[str, list[tuple[str, str]]] = {group: [] for group in _TITLES}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                rows[getattr(parameter, "group", "")].append(record)
        for group, entries in rows.items():
            if entries:
                with formatter.section(_TITLES[group]):
                    formatter.write_dl(entries)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the whole page where it fits one screen, otherwise a short one with as many options as fit."""
        # Most options take two lines.
        text = self._whole_page(ctx) if 2 * len(self.params) < SCREEN_LINES else ""
        if not text or _count_lines(text, formatter.width) > SCREEN_LINES:
            text = self._short_page(ctx)
        formatter.write(text)

    def _whole_page(self, ctx: click.Context) -> str:
        formatter = ctx.make_formatter()
        super().format_help(ctx, formatter)
        return formatter.getvalue()

    def _short_page(self, ctx: click.Context) -> str:
        """Return the purpose, the options most used in a line each, the names of others, and examples."""
        formatter = ctx.make_formatter()
        self.format_usage(ctx, formatter)
        width = formatter.width
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(" ".join((self.help or "").partition("\n\n")[0].split()))
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option) and not each.hidden]
        general = [option for option in options if not isinstance(option, GroupedOption)]
        fields = [option for option in options if isinstance(option, GroupedOption) and FINER not in option.group]
        explained = [*general, *(option for option in fields if set(option.opts) & set(_OFTEN_USED.split()))]
        order = sorted(explained, key=lambda option: (not option.required, option.opts[-1] in _SELDOM_USED.split()))
        lines = {option: _option_line(option, ctx, width) for option in order[:SCREEN_LINES]}
        examples = [line.strip() for line in (self.epilog or "").splitlines() if line.strip().startswith("shapewright")]
        # Those that a narrow terminal does not wrap come first.
        shown = sorted(examples, key=lambda line: len(line) + 2 > width)[:_MOST_EXAMPLES]
        ending = "\nExamples:\n" + "".join(f"  {line}\n" for line in examples if line in shown)
        ending += f"\n'{ctx.command_path} --help-all' explains all {len(options)} options.\n"

        def page(num_options: int) -> str:
            listed = [option for option in explained if option in order[:num_options]]
            names = [min(option.opts, key=len) for option in (*general, *fields) if option not in listed]
            also = "\n" + "".join(f"  {line}\n" for line in _name_lines(names, width)) if names else ""
            return f"{formatter.getvalue()}\nOptions:\n{''.join(map(lines.__getitem__, listed))}{also}{ending}"

        text, num_options = page(len(lines)), len(lines)
        while _count_lines(text, width) > SCREEN_LINES and num_options > 0:
            num_options -= 1
            text = page(num_options)
        return text


def _count_lines(text: str, width: int) -> int:
    """Count the lines that a terminal shows."""
    return sum(max(1, -(-len(line) // width)) for line in text.splitlines())


def _name_lines(names: list[str], width: int) -> list[str]:
    """Return names as lines of text, cut off after the most lines allowed."""
    lines = textwrap.wrap(
        "Also: " + " ".join(names), width - 6, subsequent_indent=" " * len("Also: "), break_on_hyphens=False
    )
    if len(lines) > _MOST_NAME_LINES:
        lines = [*lines[: _MOST_NAME_LINES - 1], lines[_MOST_NAME_LINES - 1] + " ..."]
    return lines


def _option_line(option: click.Option, ctx: click.Context, width: int) -> str:
    """Return flags and meaning of an option in one line; a meaning that is too long ends with a clause of it.

    Values to choose from are shown: beside the flag where the line has room for them, else in place of the meaning.
    """
    flags, meaning = option.get_help_record(ctx) or ("", "")
    choices = option.type.choices if isinstance(option.type, click.Choice) else ()
    if len(flags) > _FLAGS_WIDTH and not (choices and len(flags) <= width // 2):
        flags = ", ".join(option.opts)
        meaning = ", ".join(choices) or meaning
    meaning, room = " ".join(meaning.split()), max(width - max(_FLAGS_WIDTH, len(flags)) - 4, 20)
    return f"  {flags:<{_FLAGS_WIDTH}}  {_shorten(meaning, room)}".rstrip() + "\n"


def _shorten(meaning: str, room: int) -> str:
    """Return a text of at most ``room`` characters that ends with a clause, or with dots where it goes on."""
    if len(meaning) <= room:
        return meaning
    ends = [(match.start(), "") for match in _CLAUSE_END.finditer(meaning)]
    ends += [(match.start(), f",{_MORE}") for match in _COMMA.finditer(meaning)]
    length, ending = max((end for end in ends if end[0] + len(end[1]) <= room), default=(0, ""))
    if length >= room // 3:
        return meaning[:length] + ending
    return textwrap.shorten(meaning, room, placeholder=_MORE, break_on_hyphens=False)


# Command -> template of the next one. {job} is CONFIG, the device and every option of _SCENARIO and the model that was
# given; {plan_job} leaves out what a plan chooses.
_NEXT = {
    "predict": "check {job}",
    "check": "search {search_job}",
    "memory": "plan {plan_job} --gpus 8 --global-batch 64",
    "compare": "plan {plan_job} --gpus 8 --global-batch 64",
    "mfu": "check {job}",
    "design": "design {typed} -o design",
    "design -o": "report {output}/config.json --device {device} -o review.html",
    "plan": "check {job}",
    "serve-plan": "serve-plan {serving_job} --format {engine}",
    "flops": "predict {model} --device {device}",
    "params": "memory {model} --device {device}",
    "batch": "plan {model} --device {device} --gpus 8 --global-batch 64",
    "search": "report {job} -o review.html",
    "report": "search {job}",
    "devices": "devices show h100-sxm-80gb",
    "devices show": "predict {model} --device {name}",
    "models": "check llama-3-8b --device {device}",
    "rule": "check {model} --device {device}",
    "accuracy": "calibrate --store STORE -o calibration.json",
    "bench": "calibrate --store {store} -o calibration.json",
    "proxy": "calibrate --losses {store} -o losses.json",
    "calibrate": "predict {model} --device {device} --calibration {output}",
    "calibrate --losses": "search {model} --device {device} --loss-law {output}",
    "plot": "bench smoke --store {store}",
    "store ls": "accuracy {path}",
    "store show": "accuracy {path}",
    "store export": "accuracy {folder}",
    "store merge": "store verify {path}",
    "store rescue": "store verify {path}",
    "store import": "store verify {path}",
}
# The same where CONFIG is a traced module, which is not searched.
_NEXT_OF_TRACE = {
    "predict": "check {job}",
    "check": "memory {job}",
    "memory": "report {job} -o review.html",
    "mfu": "check {job}",
    "report": "serve {job}",
}
_EXAMPLE_MODEL, _EXAMPLE_DEVICE = "llama-3-8b", "h100-sxm-80gb"
_NEXT_IN_CONTEXT = "shapewright.next"
# Options that a command keeps for the next one, and those of a serving plan: fields of workload and layout, and others.
_DEVICE = ("node_size", "network_gbit_per_s", "calibration", "physics_only", "uncalibrated")
_SCENARIO = ("layout_from", "workload", "layout", "optimizer", "software", *_DEVICE)
# Fields of the workload that a plan chooses, or that its own options set.
_CHOSEN_BY_PLAN = (
    *("micro_batch_size", "global_batch_size", "recompute", "recompute_modules", "recompute_layers"),
    *("offload_activations", "offload_optimizer"),
)
_TRACE = ("trace_inputs", "trace_fused", "trace_values", "trace_config", "trace_time_limit_s")
_SERVING = (
    *("layout_from", "workload", "layout", "num_devices", "formats", "server", *_DEVICE),
    *("cached_len", "requests_per_s", "memory_fraction", "block_tokens"),
    *("draft_tokens", "acceptance", "draft_cost", "draft_size", "lora_rank", "lora_adapters", "lora_targets"),
)
_LIMITS = ("ttft_limit_s", "tpot_limit_s")
# Parameters whose output is not a text for a person, or is a file.
_OTHER_OUTPUT = ("as_json", "as_csv", "oneline")
_FORMATS_FILES = ("search", "store export")  # of these commands --format is that of a file beside the text


def set_next(template: str, fields: Mapping[str, Any] | None = None) -> None:
    """Set the next command of the running one, as in _NEXT, with other values of options than those given.

    Args:
        template: Template of the next command; braces that are part of it are doubled.
        fields: New values of options, by their name or by the name of their field.
    """
    context = click.get_current_context()
    context.meta[_NEXT_IN_CONTEXT] = template
    for option in context.command.params:
        name = option.name or ""
        field = name.rpartition("__")[2]
        if fields and field in fields:
            context.params[name] = fields[field]
            context.set_parameter_source(name, click.core.ParameterSource.COMMANDLINE)


def describe_next(context: click.Context, *, is_met: bool = True) -> str:
    """Return the line on the next command after one that printed text; empty after others.

    Args:
        context: Context of the command that ran.
        is_met: Whether it answered what was wanted (exit code 0); limits that no plan keeps are not repeated.
    """
    given = context.params
    command = context.command_path.removeprefix("shapewright ") + (" --losses" if given.get("losses_path") else "")
    if command == "design" and given["output"]:
        command = "design -o"
    from shapewright.lowering.torch_trace import is_target

    is_traced = bool(given.get("trace_config")) or is_target(given.get("config"))
    template = context.meta.get(_NEXT_IN_CONTEXT) or (_NEXT_OF_TRACE if is_traced else _NEXT).get(command)
    if (
        template is None
        or _config_words(context) == ["-"]
        or any(given.get(name) for name in _OTHER_OUTPUT)
        or given.get("form", "text") != "text"
    ):
        return ""
    is_report = command in _FORMATS_FILES or (command == "plan" and given.get("output"))
    if given.get("format_name") and not is_report:
        return ""
    from shlex import join, quote

    model = " ".join((*_config_words(context), *_given_options(context, "model"))) or _EXAMPLE_MODEL
    device = quote(str(given.get("device") or given.get("devices") or _EXAMPLE_DEVICE).partition(",")[0])
    on_device = f"--device {device}"
    lengths = f"--isl {_length_of(given, 'prompt_len', 1000)} --osl {_length_of(given, 'output_len', 200)}"
    words = {
        "typed": join(context.meta.get(_TYPED, ())),
        "model": model,
        "device": device,
        "job": " ".join((model, on_device, *_given_options(context, *_SCENARIO, *_TRACE))),
        "search_job": " ".join(
            (model, on_device, *_given_options(context, *_SCENARIO, *_TRACE, "train_tokens", "loss_law"))
        ),
        "plan_job": " ".join(
            (model, on_device, *_given_options(context, "workload", "software", *_DEVICE, without=_CHOSEN_BY_PLAN))
        ),
        "engine": _engine_of(given.get("server")),
        "serving_job": " ".join(
            (model, on_device, lengths, *_given_options(context, *_SERVING, *(_LIMITS if is_met else ())))
        ),
        "store": quote(str(given.get("store_path") or given.get("store") or "STORE")),
        **{name: quote(str(given[name])) for name in ("path", "folder", "name") if given.get(name)},
        "output": quote(str(given.get("output") or "FILE")),
    }
    return f"next: shapewright {template.format_map(words)}"


def _engine_of(server: str | None) -> str:
    """Return the engine of a server whose launch lines are written; vLLM for those of no engine."""
    engine = (server or "").strip().casefold().partition("-")[0]
    return engine if engine in ("sglang", "trtllm") else "vllm"


def _length_of(given: Mapping[str, Any], name: str, default: int) -> int:
    """Return a length that was given, the mean of a distribution, or else a default."""
    length = given.get(name)
    if isinstance(length, str):
        from shapewright.optimize.serving.traffic.requests import read_lengths

        return round(read_lengths(length, name).mean)
    return length or default


def _config_words(context: click.Context) -> list[str]:
    """Return CONFIG as it was given: a name, the path of a trainer's file, or - for standard input."""
    from shlex import quote

    config = context.meta.get(CONFIG_FILE) or context.params.get("config")
    return [] if config is None else [quote(config) if isinstance(config, str) else "-"]


def _hidden_values(context: click.Context) -> dict[str, Any]:
    """Return the given values of options that a command does not take as arguments, such as --node-size."""
    typed = list(context.meta.get(_TYPED, ()))
    values: dict[str, Any] = context.command.make_parser(context).parse_args(typed)[0]
    hidden = {option.name for option in context.command.params if not option.expose_value}
    return {name: value for name, value in values.items() if name in hidden}


def _given_options(context: click.Context, *groups: str, without: Collection[str] = ()) -> list[str]:
    """Return the options of some groups (model, workload, layout) that were given, as one would type them.

    Args:
        without: Fields to leave out.
    """
    from shlex import quote

    words: list[str] = []
    given = {**context.params, **_hidden_values(context)}
    for option in context.command.params:
        name = option.name or ""
        group, _, field = name.partition("__")
        value = given.get(name)
        is_default = context.get_parameter_source(name) is click.core.ParameterSource.DEFAULT
        if group not in groups or field in without or value is None or is_default:
            continue
        if isinstance(value, bool):
            words.append(option.opts[0] if value else option.secondary_opts[0])
        elif isinstance(option, click.Option) and option.multiple:
            words += [word for one in value for word in (option.opts[-1], quote(one))]
        else:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += [option.opts[-1], quote(text)]
    return words
