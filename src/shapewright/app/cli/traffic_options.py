"""Options of serve-plan for requests that arrive over time, and what it prints of their simulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from shapewright.app.cli.cluster_options import ADDRESS, ENGINE
from shapewright.app.cli.console import print_output
from shapewright.app.cli.device_options import Command, named_device
from shapewright.app.cli.help_pages import GroupedOption, set_next
from shapewright.app.cli.param_types import SECONDS, AnyParam
from shapewright.app.report.flags import flag_of

if TYPE_CHECKING:
    from shapewright.app.report.outputs.traffic import TrafficOutput
    from shapewright.hardware.device import Device

TRAFFIC = "traffic"
_PREFIX = f"{TRAFFIC}__"


class LengthOrDistribution(AnyParam):
    """Tokens as an integer, or the text of a distribution."""

    name = "dist"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002
        """Return an integer where the text is one."""
        try:
            return int(value)
        except ValueError:
            return value


_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--arrivals",
        {"metavar": "RATES", "help": "simulate random arrivals at these rates, such as 12/s or 2/s,4/s,8/s"},
    ),
    (
        "--trace",
        {
            "metavar": "FILE",
            "help": "simulate the requests of a csv or jsonl file: arrival_s, prompt_len, output_len and optionally "
            "prefix_id, prefix_len; --arrivals scales its rate",
        },
    ),
    (
        "--ttft-p90",
        {"type": SECONDS, "metavar": "TIME", "help": "limit of the 90 % quantile of the time to first token"},
    ),
    ("--tpot-p90", {"type": SECONDS, "metavar": "TIME", "help": "limit of the 90 % quantile of the time per token"}),
    ("--requests", {"type": int, "metavar": "N", "help": "requests to simulate (default: 10000)"}),
    ("--seed", {"type": int, "metavar": "N", "help": "seed of lengths and arrivals (default: 0)"}),
    (
        "--burstiness",
        {
            "type": float,
            "metavar": "F",
            "help": "shape of the gamma distribution of intervals: 1 is Poisson (default), less bursts",
        },
    ),
    ("--layouts", {"type": int, "metavar": "N", "help": "layouts to simulate on each device (default: 3)"}),
    ("--max-num-seqs", {"type": int, "metavar": "N", "help": "sequences of a batch (default: the server's)"}),
    (
        "--max-num-batched-tokens",
        {
            "type": int,
            "metavar": "N",
            "help": "tokens of a pass, shared by decode and prefill (default: the server's)",
        },
    ),
    ("--engine", ENGINE),
    ("--address", ADDRESS),
)
_OFTEN_USED = ("--arrivals", "--trace", "--ttft-p90", "--tpot-p90")
_FIELDS = {"requests": "num_requests", "layouts": "num_layouts", "ttft_p90": "ttft_p90_s", "tpot_p90": "tpot_p90_s"}


def traffic_options(command: Command) -> Command:
    """Add the options of a simulation to a command."""
    for flag, keywords in reversed(_OPTIONS):
        name = flag[2:].replace("-", "_")
        grouped: dict[str, Any] = {} if flag in _OFTEN_USED else {"cls": GroupedOption, "group": TRAFFIC}
        command = click.option(flag, f"{_PREFIX}{name}", default=None, **grouped, **keywords)(command)
    return command


def take_traffic(given: dict[str, Any]) -> dict[str, Any] | None:
    """Take the options of a simulation out of those of a command; None where neither arrivals nor a trace is given.

    Raises:
        UsageError: one of the other options is given without them.
    """
    taken = {name: given.pop(name) for name in list(given) if name.startswith(_PREFIX)}
    named = {name.removeprefix(_PREFIX): value for name, value in taken.items() if value is not None}
    if "arrivals" not in named and "trace" not in named:
        if named:
            flag = flag_of(next(iter(named)))
            raise click.UsageError(f"{flag} needs --arrivals, such as --arrivals 12/s, or --trace FILE")
        return None
    return {_FIELDS.get(name, name): value for name, value in named.items()}


# Options of the closed form alone, by parameter, with what a simulation has in their place.
_CLOSED_FORM = {
    "ttft_limit_s": ("--ttft", "give --ttft-p90"),
    "tpot_limit_s": ("--tpot", "give --tpot-p90"),
    "formats": ("--formats", "give --dtype, one format at a time"),
    "requests_per_s": ("--load", "give --arrivals"),
    "format_name": ("--format", "leave it out"),
    **{
        flag[2:].replace("-", "_"): (flag, "leave it out")
        for flag in (
            "--draft-tokens",
            "--acceptance",
            "--draft-cost",
            "--draft-size",
            "--lora-rank",
            "--lora-adapters",
            "--lora-targets",
        )
    },
}


def refuse_closed_form_options(given: dict[str, Any]) -> None:
    """Take the options of the closed form out of those of a command that simulates.

    Raises:
        UsageError: one is given.
    """
    for name, (flag, instead) in _CLOSED_FORM.items():
        if given.pop(name) is not None:
            raise click.UsageError(f"{flag} has no effect on simulated traffic (--arrivals, --trace); {instead}")


def single_length(flag: str, value: int | str | None) -> int:
    """Return the one length that the closed form takes.

    Raises:
        UsageError: it is missing, or a distribution.
    """
    if value is None:
        raise click.UsageError(f"missing option {flag}; give the tokens, or requests with --trace FILE")
    if isinstance(value, str):
        raise click.UsageError(
            f"{flag} {value!r} is not a number of tokens; a distribution needs --arrivals, such as --arrivals 12/s"
        )
    return value


def simulate_traffic(config: str | None, device: str, *, as_json: bool, html: str | None, **given: Any) -> int:
    """Simulate, print the result, and return the exit code: 1 if no server keeps the limits."""
    from shapewright.app.api.traffic import serve_traffic
    from shapewright.app.report.optimize.traffic import print_traffic, traffic_page
    from shapewright.app.report.outputs.traffic import traffic_output

    names = [name for name in device.split(",") if name.strip()] or [device]
    devices = [named_device(name) for name in names]
    output = traffic_output(serve_traffic(config, device=devices[0], devices=devices[1:], **given))
    print_output(output, print_traffic, as_json=as_json, html=html, page=traffic_page)
    launched = _launched_fields(output, dict(zip(names, devices, strict=True)))
    set_next("serve-plan {serving_job} --format {engine}", launched)
    return 0 if output.keeps_limits else 1


def _launched_fields(output: TrafficOutput, devices: Mapping[str, Device]) -> dict[str, Any]:
    """Return options of the closed form that plan a unit of the best server for the requests that were simulated.

    Args:
        devices: The devices by the words that named them.
    """
    request = output.request
    fields: dict[str, Any] = {}
    if request.source == "trace":
        fields = {"prompt_len": round(request.mean_prompt_len), "output_len": max(round(request.mean_output_len), 1)}
    if output.best is None:
        return fields
    server = output.servers[output.runs[output.best].server]
    words = next(words for words, device in devices.items() if device.name == server.device)
    fields |= {"device": words, "num_devices": server.num_devices // server.num_units}
    if server.prefill_layout is None:
        # On as many devices as one instance has, its degrees leave no other plan.
        degrees = {name: degree for name, degree in vars(server.layout).items() if name != "num_devices"}
        fields |= {name: degree for name, degree in degrees.items() if degree is not None and degree > 1}
        if server.layout.expert_parallel > 1:
            fields["expert_tensor_parallel"] = server.layout.expert_tensor_parallel
    return fields
