"""shapewright serve-plan: plan the serving of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from shapewright.app.cli.console import echo, print_output, refuse_unwritable, write_text_file
from shapewright.app.cli.defaults import device_callback
from shapewright.app.cli.device_options import calibration_option, named_device, node_options
from shapewright.app.cli.help_pages import GroupedCommand
from shapewright.app.cli.names import complete_device
from shapewright.app.cli.options import api_keywords, field_options
from shapewright.app.cli.param_types import PRICE, REQUEST_RATE, SECONDS
from shapewright.app.cli.traffic_options import (
    LengthOrDistribution,
    refuse_closed_form_options,
    simulate_traffic,
    single_length,
    take_traffic,
    traffic_options,
)
from shapewright.app.report.flags import with_flags

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.app.formats.servers.instance import Engine
    from shapewright.app.report.outputs.serving import ServePlanOutput

_EPILOG = """\b
Examples:
  shapewright serve-plan llama-3-8b --device h100-sxm-80gb --isl 4000 --osl 500
  shapewright serve-plan llama-3-70b --device h200-sxm-141gb --isl 4000 --osl 500 --ttft 2s --tpot 30ms --gpus 16
  shapewright serve-plan mixtral-8x7b --device h100-sxm-80gb --isl 1000 --osl 300 --formats fp8,bf16:int4 --json
  shapewright serve-plan deepseek-v3 --device h200-sxm-141gb --dtype fp8 --isl 4000 --osl 1000 --gpus 32 --ep 32
  shapewright serve-plan llama-3.1-70b --device h200-sxm-141gb --dtype fp8 --isl 1000 --osl 1000 --server trtllm-1.0
  shapewright serve-plan llama-3-8b --device l40s --isl 512 --osl 128 --draft-tokens 4 --acceptance 0.7 --draft-cost 0.1
  shapewright serve-plan llama-3-8b --device h100-sxm-80gb --isl 1000 --osl 200 --lora-rank 16 --lora-adapters 32
  shapewright serve-plan qwen2.5-vl-7b --device h100-sxm-80gb --isl 2000 --osl 200 --images 1
  shapewright serve-plan llama-3.1-8b --device h100-sxm-80gb --isl 16000 --cached-prefix 14000 --osl 300
  shapewright serve-plan llama-3-8b --device h100-sxm-80gb --isl 4000 --osl 500 --usd-per-hour 2.5 --html plan.html
  shapewright serve-plan llama-3-8b --device h100-sxm-80gb --isl 4000 --osl 500 --tpot 15ms --load 20/s
  shapewright serve-plan llama-3-8b --device h100-sxm-80gb --isl 4000 --osl 500 --gpus 1 --tpot 15ms --format vllm
  shapewright serve-plan llama-3-8b --device h100-sxm-80gb --arrivals 12/s --isl lognormal:800,600 --osl geometric:200
  shapewright serve-plan llama-3-8b --device h100-sxm-80gb --arrivals 4/s,8/s --isl 1000 --osl 200 --ttft-p90 500ms
  shapewright serve-plan llama-3-8b --device h100-sxm-80gb,l40s --trace requests.csv --gpus 2 --tpot-p90 30ms --json
"""

_FIELDS = {
    "workload": ("dtype", "weight_dtype", "kv_cache_dtype", "attention", "expert_kernel", "images", "image_size"),
    "layout": (
        "tensor_parallel",
        "pipeline_parallel",
        "data_parallel",
        "expert_parallel",
        "expert_tensor_parallel",
    ),
}


@click.command("serve-plan", cls=GroupedCommand, epilog=_EPILOG)
@field_options(_FIELDS)
@calibration_option
@node_options
@click.option(
    "--device",
    metavar="NAME",
    callback=device_callback,
    shell_complete=complete_device,
    help="device name, alias or TOML file; with --arrivals or --trace several",
)
@click.option(
    "--isl",
    "prompt_len",
    type=LengthOrDistribution(),
    metavar="DIST",
    help="tokens per prompt; with --arrivals also uniform:LOW,HIGH, normal:MEAN,DEVIATION, lognormal:MEAN,DEVIATION, "
    "geometric:MEAN, poisson:MEAN, or lengths with shares such as 128=0.7,2048=0.3",
)
@click.option("--osl", "output_len", type=LengthOrDistribution(), metavar="DIST", help="tokens per answer, as --isl")
@click.option(
    "--cached-prefix",
    "cached_len",
    type=int,
    default=0,
    metavar="N",
    help="prompt tokens already in the cache, such as earlier turns or a shared prefix",
)
@click.option(
    "--ttft",
    "ttft_limit_s",
    type=SECONDS,
    metavar="TIME",
    help="limit on the time to first token, such as 300ms (default, for the recommended point alone: 1s, or twice the "
    "shortest if that is longer)",
)
@click.option(
    "--tpot", "tpot_limit_s", type=SECONDS, metavar="TIME", help="limit on the time per output token, such as 10ms"
)
@click.option(
    "--gpus", "num_devices", type=int, metavar="N", help="number of devices (default: instances of up to a node)"
)
@click.option(
    "--formats",
    metavar="F,F,...",
    help="further formats to compare, each GEMMs[:weights[:cache]], such as fp8,bf16:int4; 'none' for no others "
    "(default: fp8 where the device has it, and weights in int4, or MXFP4 for such a checkpoint)",
)
@click.option(
    "--server",
    metavar="NAME-VERSION",
    help="inference engine and version, such as trtllm-1.0, vllm-0.10 or sglang-0.5: its defaults, kernels and host "
    "(default: what current engines share)",
)
@click.option(
    "--memory-fraction",
    type=float,
    metavar="F",
    help="fraction of device memory that the server uses (default: the server's, 0.9)",
)
@click.option(
    "--block-tokens", type=int, metavar="N", help="tokens of a block of the paged cache (default: the server's)"
)
@click.option("--draft-tokens", type=int, metavar="N", help="speculative decoding: draft tokens per pass")
@click.option("--acceptance", type=float, metavar="F", help="speculative decoding: acceptance rate of a draft token")
@click.option(
    "--draft-cost",
    type=float,
    metavar="F",
    help="speculative decoding: time of a draft step as a fraction of a decode step",
)
@click.option(
    "--draft-size",
    type=float,
    metavar="F",
    help="speculative decoding: weights, cache and prefill of the draft as a fraction of the model's "
    "(default: --draft-cost)",
)
@click.option("--lora-rank", type=int, metavar="N", help="LoRA adapters: rank")
@click.option("--lora-adapters", type=int, metavar="N", help="LoRA adapters: number resident in memory")
@click.option(
    "--lora-targets", metavar="NAMES", help="LoRA adapters: modules such as q_proj,v_proj or mlp (default: all-linear)"
)
@click.option(
    "--load",
    "requests_per_s",
    type=REQUEST_RATE,
    metavar="RATE",
    help="requests to carry, such as 12/s: recommends the point with fewest devices, and counts instances with a spare",
)
@click.option(
    "--usd-per-hour",
    type=PRICE,
    metavar="USD",
    help="price of one device for an hour; of several devices NAME=USD,...: the best server is the cheapest",
)
@click.option(
    "--format",
    "format_name",
    metavar="NAME",
    help="print the commands that launch the recommended point instead: vllm, sglang or trtllm; with --json, under "
    "the key launch",
)
@click.option("-o", "--output", metavar="FILE", help="write the output of --format to a file, and print the report")
@traffic_options
@click.option("--json", "as_json", is_flag=True, help="print JSON")
@click.option("--html", metavar="FILE", help="also write an HTML page with the Pareto front")
def command(config: str | None, device: str, as_json: bool, html: str | None, output: str | None, **given: Any) -> int:
    """Plan how to serve CONFIG: batch, layout, format, aggregated or disaggregated prefill.

    KV capacity, time to first token, time per token, throughput, and the front between tokens/s of a GPU and of a user.
    Exit code 1: no way to serve keeps --ttft and --tpot.

    With --arrivals or --trace, requests are simulated one by one on the best layouts: percentiles of time to first
    token, time per token and end to end, queue, cache use, and the share that keeps --ttft-p90 and --tpot-p90.
    """
    if output is not None and given["format_name"] is None:
        raise click.UsageError("-o has no effect without --format: give an engine, or leave -o out")
    refuse_unwritable(html, output)
    engine = _read_engine(given["format_name"], given["server"])
    traffic = take_traffic(given)
    if traffic is not None:
        refuse_closed_form_options(given)
        return simulate_traffic(config, device, as_json=as_json, html=html, **api_keywords(given), **traffic)
    del given["format_name"]
    return _plan(config, device, engine, given, as_json=as_json, html=html, path=output)


def _plan(
    config: str | None,
    device: str,
    engine: Engine | None,
    given: dict[str, Any],
    *,
    as_json: bool,
    html: str | None,
    path: str | None,
) -> int:
    """Plan by the closed form, print the result, and return the exit code: 1 if no point keeps the limits."""
    from shapewright.app.api.serving import serve_plan
    from shapewright.app.report.optimize.serving import print_serving, serving_page
    from shapewright.app.report.outputs.serving import serve_plan_output

    if isinstance(given["usd_per_hour"], dict):
        raise click.UsageError(
            "--usd-per-hour NAME=USD,... compares servers of several devices (--arrivals, --trace); give one price, "
            "such as 2.5"
        )
    formats, server = given.pop("formats"), given.pop("server")
    speculation, adapters = _take_speculation(given), _take_adapters(given)
    found = serve_plan(
        config,
        device=named_device(device),
        prompt_len=single_length("--isl", given.pop("prompt_len")),
        output_len=single_length("--osl", given.pop("output_len")),
        formats=None if formats is None else [word for word in formats.split(",") if word and word != "none"],
        speculation=speculation,
        adapters=adapters,
        server=server or (engine.server_name if engine else None),
        **api_keywords(given),
    )
    launch = None
    if engine is not None:
        from shapewright.app.formats.servers.launch import choose_expressible, write_launch

        found = choose_expressible(found, engine)
        launch = write_launch(found, engine.name)
    output = serve_plan_output(found, launch)
    if launch is not None and path is not None:
        write_text_file(path, launch.text)
        echo(f"wrote {path}", err=True)
    is_report = launch is None or path is not None
    print_output(output, print_serving if is_report else _print_launch, as_json=as_json, html=html, page=serving_page)
    if launch is not None and not as_json:
        for words in launch.warnings:
            echo(f"warning: {with_flags(words)}", err=True)
    return 0 if output.keeps_limits else 1


def _print_launch(output: ServePlanOutput, _: Console) -> None:
    assert output.launch is not None
    click.echo(output.launch.text, nl=False)


def _take_adapters(given: dict[str, Any]) -> dict[str, Any] | None:
    """Parameters of LoRA adapters: rank and number, and optionally targets."""
    rank, num_resident, targets = (given.pop(f"lora_{name}") for name in ("rank", "adapters", "targets"))
    if rank is None and num_resident is None and targets is None:
        return None
    if rank is None or num_resident is None:
        raise click.UsageError("--lora-rank and --lora-adapters belong together: give both")
    return {"rank": rank, "num_resident": num_resident, **({"targets": targets} if targets is not None else {})}


def _read_engine(format_name: str | None, server: str | None) -> Engine | None:
    """The engine of --format; it must be that of --server."""
    if format_name is None:
        return None
    from shapewright.app.formats.servers.launch import find_engine

    engine = find_engine(format_name)
    if server is not None and server.strip().casefold().partition("-")[0] not in (engine.name, "current"):
        raise click.UsageError(
            f"--format {format_name} and --server {server} are different engines; give --server {engine.server_name}, "
            f"or leave it out"
        )
    return engine


def _take_speculation(given: dict[str, Any]) -> dict[str, Any] | None:
    """Parameters of speculative decoding: the first three or none, and optionally the size of the draft."""
    names = {
        "num_draft_tokens": "draft_tokens",
        "acceptance_fraction": "acceptance",
        "draft_cost_fraction": "draft_cost",
    }
    found = {name: given.pop(option) for name, option in names.items()}
    size = given.pop("draft_size")
    if size is None and all(value is None for value in found.values()):
        return None
    if any(value is None for value in found.values()):
        raise click.UsageError("--draft-tokens, --acceptance and --draft-cost belong together: give all three")
    return found if size is None else {**found, "draft_size_fraction": size}
