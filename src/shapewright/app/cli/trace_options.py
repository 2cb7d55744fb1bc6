"""Options that trace a PyTorch module: a callable of the user's own file, or the model that transformers builds."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from shapewright.app.cli.device_options import Command, named_device
from shapewright.app.cli.help_pages import GroupedOption
from shapewright.app.cli.options import group_options
from shapewright.app.report.flags import SHORT_FLAGS, flag_of
from shapewright.core.errors import TraceError
from shapewright.core.records import dataclass
from shapewright.lowering.torch_trace import DEFAULT_TIME_LIMIT_S, is_target

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.lowering.torch_trace.trace import Trace
    from shapewright.prediction.traced import TracedPrediction

_OF_FILE = ("phase", "dtype", "optimizer")
_OF_CONFIG = (*_OF_FILE, "micro_batch_size", "seq_len")
_LINE = r"(?P<line>[^=]+:\d+)=(?P<value>-?\d+)"
_DEFAULT_SEQ_LEN, _DEFAULT_BATCH = 2048, 4
# Keys of configs that limit the sequence length.
_LONGEST_KEYS = ("max_position_embeddings", "n_positions", "max_target_positions")


@dataclass(frozen=True)
class TracedJob:
    """A traced module, the device to price it on, and the optimizer."""

    trace: Trace
    device: Device
    optimizer: str | None

    def predict(self) -> TracedPrediction:
        """Predict the step."""
        from shapewright.prediction.traced import predict_trace

        return predict_trace(self.trace, self.device, optimizer=self.optimizer)


def trace_options(command: Command) -> Command:
    """Add the options of a trace to a command whose CONFIG may be ``file.py:callable``."""
    options = [
        _option(
            "--inputs",
            "trace_inputs",
            metavar="SPECS",
            help="inputs of the module that CONFIG names as FILE.py:CALLABLE, such as 'tokens=int64[4,2048]'; runs the "
            "file",
        ),
        _option(
            "--fused",
            "trace_fused",
            is_flag=True,
            help="merge chains of pointwise operations as torch.compile does",
        ),
        _option(
            "--value",
            "trace_values",
            multiple=True,
            metavar="FILE.py:LINE=N",
            help="value, or number of rows, that the control flow of the module depends on",
        ),
        _option(
            "--time-limit",
            "trace_time_limit_s",
            type=float,
            metavar="S",
            help=f"end a trace after this time (default: {DEFAULT_TIME_LIMIT_S:g})",
        ),
        _option(
            "--traceback",
            "trace_traceback",
            is_flag=True,
            help="print the traceback of a module that fails",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _option(*names: str, **keywords: Any) -> Callable[[Command], Command]:
    return click.option(*names, cls=GroupedOption, group="trace", **keywords)


def trace_config_option(command: Command) -> Command:
    """Add --trace, which traces the model that transformers builds from CONFIG."""
    return _option(
        "--trace",
        "trace_config",
        is_flag=True,
        help="trace the model that transformers builds from CONFIG, of any architecture; no weights, no remote code",
    )(command)


def pop_traced_job(config: str | None, device: str, given: dict[str, Any], **idle: object) -> TracedJob | None:
    """Take the options of a trace from those given, and trace; None where CONFIG is no module and --trace is not given.

    Args:
        given: Options by name; those of a trace are removed.
        idle: Values of other options that have no effect on a trace, by flag without dashes; falsy where not given.

    Raises:
        TraceError: the module cannot be traced.
    """
    own = {name: given.pop(name) for name in [*given] if name.startswith("trace_")}
    wants_config = bool(own.get("trace_config"))
    if not is_target(config) and not wants_config:
        for name, flag in (("inputs", "--inputs"), ("fused", "--fused"), ("values", "--value"),
                           ("time_limit_s", "--time-limit"), ("traceback", "--traceback")):  # fmt: skip
            if own.get(f"trace_{name}"):
                raise click.UsageError(f"{flag} has no effect without FILE.py:CALLABLE or --trace")
        return None
    assert config is not None or wants_config
    if config is None:
        raise click.UsageError("--trace needs CONFIG: a config.json, a model folder, a preset or a hub id")
    chosen = _chosen_fields(given, _OF_FILE if is_target(config) else _OF_CONFIG)
    for flag, value in idle.items():
        if value:
            raise click.UsageError(f"{flag_of(flag)} has no effect on a traced module")
    # An unknown device is said before anything is run.
    found = named_device(device)
    optimizer = chosen.pop("optimizer", None)
    options: dict[str, Any] = {
        "phase": chosen.get("phase", "train"),
        "dtype": chosen.get("dtype"),
        "fused": bool(own["trace_fused"]),
        "values": _read_values(own["trace_values"]),
    }
    if own["trace_time_limit_s"] is not None:
        options["time_limit_s"] = own["trace_time_limit_s"]
    from shapewright.lowering.torch_trace.child import trace_target

    try:
        if is_target(config):
            trace = trace_target(config, own["trace_inputs"] or "", **options)
        else:
            trace = _trace_config(config, own["trace_inputs"], chosen, options)
    except TraceError as error:
        if not own["trace_traceback"]:
            error.user_traceback = ""
        raise
    return TracedJob(trace, found, optimizer)


def _trace_config(config: str, inputs: str | None, chosen: dict[str, Any], options: dict[str, Any]) -> Trace:
    from shapewright.lowering.torch_trace.child import trace_config
    from shapewright.lowering.torch_trace.huggingface import is_denoiser
    from shapewright.models.read import find_config

    raw, source, _ = find_config(config)
    if is_denoiser(raw) and "seq_len" in chosen:
        raise click.UsageError(
            "--seq-len has no effect on a diffusion transformer, traced for 1024 x 1024 pixels; give "
            "the inputs of another size with --inputs"
        )
    longest = next((raw[key] for key in _LONGEST_KEYS if raw.get(key)), _DEFAULT_SEQ_LEN)
    default = min(_DEFAULT_SEQ_LEN, longest) if isinstance(longest, int) and longest > 0 else _DEFAULT_SEQ_LEN
    return trace_config(
        raw,
        source,
        batch_size=chosen.get("micro_batch_size") or _DEFAULT_BATCH,
        seq_len=chosen.get("seq_len") or default,
        inputs=inputs,
        **options,
    )


def _chosen_fields(given: dict[str, Any], allowed: tuple[str, ...]) -> dict[str, Any]:
    """Fields that a trace takes; others are refused."""
    groups = group_options(given)
    for group, fields in groups.items():
        for name in fields:
            if group != "workload" or name not in allowed:
                flag = SHORT_FLAGS.get(name, flag_of(name))
                raise click.UsageError(
                    f"{flag} has no effect on a traced module, which is run as it is on one device; a trace takes "
                    + ", ".join(map(flag_of, allowed))
                )
    return groups["workload"]


def _read_values(texts: tuple[str, ...]) -> dict[str, int]:
    values = {}
    for text in texts:
        found = re.fullmatch(_LINE, text.strip())
        if found is None:
            raise click.UsageError(f"--value {text!r} is not of the form FILE.py:LINE=N, such as model.py:33=512")
        values[found["line"]] = int(found["value"])
    return values
