"""serve_traffic: requests that arrive over time, on simulated servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from shapewright.app.api.parts import ScenarioLike, ScenarioParts, given_fields, takes_scenario
from shapewright.app.api.serving import build_served, find_server, served_format
from shapewright.core.errors import WorkloadError
from shapewright.core.texts import FieldName, with_fields
from shapewright.hardware.nodes import check_allocation
from shapewright.prediction.build import find_device, find_ignored_expert_split
from shapewright.prediction.training_run import check_price

if TYPE_CHECKING:
    from shapewright.optimize.serving.traffic.requests import RandomTraffic, Traffic
    from shapewright.optimize.serving.traffic.sweep import TrafficPlan
    from shapewright.prediction.build import DeviceLike
    from shapewright.pricing.servers import Server


@takes_scenario
def serve_traffic(
    config: ScenarioLike,
    *,
    arrivals: str | float | None = None,
    prompt_len: str | int | None = None,
    output_len: str | int | None = None,
    trace: str | Path | Traffic | None = None,
    devices: Sequence[DeviceLike] = (),
    cached_len: int = 0,
    num_requests: int | None = None,
    seed: int = 0,
    burstiness: float = 1.0,
    ttft_p90_s: float | None = None,
    tpot_p90_s: float | None = None,
    num_devices: int | None = None,
    num_layouts: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    memory_fraction: float | None = None,
    block_tokens: int | None = None,
    usd_per_hour: float | Mapping[str, float] | None = None,
    server: str | Server | None = None,
    engine: str = "local",
    address: str | None = None,
    **parts: Unpack[ScenarioParts],
) -> TrafficPlan:
    """Simulate requests that arrive over time on the best layouts: continuous batching, request by request.

    The same seed gives the same requests at every rate and on every layout, and the same result.

    Args:
        config: A decoder model or a Scenario, see ScenarioLike.
        arrivals: Rates such as ``12/s`` or ``2/s,4/s``; with a trace, its intervals are scaled to them.
        prompt_len: Distribution of prompt lengths: ``500``, ``uniform:100,900``, ``normal:MEAN,DEVIATION``,
            ``lognormal:MEAN,DEVIATION``, ``geometric:MEAN``, or lengths with shares as ``128=0.7,2048=0.3``.
        output_len: Distribution of answer lengths.
        trace: File of requests instead of distributions, see ``optimize.serving.traffic.trace``.
        devices: Further devices to simulate.
        cached_len: Tokens at the start of every prompt that all share.
        num_requests: Requests to draw; 10,000 by default.
        seed: Seed of the generator.
        burstiness: Shape of the gamma distribution of intervals; 1 is Poisson.
        ttft_p90_s: Limit of the time to the first token that 90 % of the requests are to keep. [s]
        tpot_p90_s: Limit of the time per further token. [s]
        num_devices: Devices; None for one instance of each layout, up to a node.
        num_layouts: Most layouts to simulate on each device.
        max_num_seqs: Most sequences of a batch; None for the server's default.
        max_num_batched_tokens: Most tokens of a pass; None for the server's default.
        memory_fraction: Share of a device's memory that the server takes; None for the server's default.
        block_tokens: Tokens of a block of the paged cache; None for the server's default.
        usd_per_hour: Price of one device, or prices by device: the best run is the cheapest; None without. [USD/h]
        server: Inference engine and version, such as ``vllm-0.10``; None for what current engines share.
        engine: ``local`` or ``ray``.
        address: Address of a Ray cluster.
        parts: See ScenarioParts.

    Raises:
        ShapewrightError: an argument is invalid, the model does not fit, or no layout holds a rate.
    """
    from shapewright.optimize.serving.request import ServingRequest
    from shapewright.optimize.serving.traffic.candidates import Scheduler
    from shapewright.optimize.serving.traffic.jobs import TrafficQuestion
    from shapewright.optimize.serving.traffic.requests import RandomTraffic, read_rates
    from shapewright.optimize.serving.traffic.sweep import plan_traffic

    source = _read_source(trace, arrivals, prompt_len, output_len, cached_len, num_requests, seed, burstiness)
    chosen: dict[str, Any] = {} if num_layouts is None else {"num_layouts": num_layouts}
    question = TrafficQuestion(
        source=source,
        rates_per_s=() if arrivals is None else read_rates(str(arrivals)),
        scheduler=Scheduler(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
        ttft_p90_s=ttft_p90_s,
        tpot_p90_s=tpot_p90_s,
        engine=engine,
        address=address,
        **chosen,
    )
    if isinstance(source, RandomTraffic):
        lengths = source.prompts.mean, source.answers.mean
    else:
        lengths = float(source.prompt_len.mean()), float(source.output_len.mean())
    own_server = find_server(server)
    prompt = max(1, round(lengths[0]))
    request = ServingRequest(
        prompt_len=prompt,
        output_len=max(2, round(lengths[1])),
        cached_len=min(cached_len, prompt - 1),
        ttft_limit_s=ttft_p90_s,
        tpot_limit_s=tpot_p90_s,
        num_devices=num_devices,
        memory_fraction=own_server.memory_fraction if memory_fraction is None else memory_fraction,
        block_tokens=own_server.block_tokens if block_tokens is None else block_tokens,
        usd_per_hour=None if isinstance(usd_per_hour, Mapping) else usd_per_hour,
        server=own_server,
    )
    layout = given_fields(parts.pop("layout", None))
    own = parts.pop("device", None)
    scenarios = []
    for device in (own, *devices):
        one: ScenarioParts = {**parts} if device is None else {**parts, "device": device}
        scenarios.append(build_served(config, one, own_server, new_len=request.new_len))
    if num_devices is not None:
        for scenario in scenarios:
            check_allocation(num_devices, scenario.device)
    first = scenarios[0]
    return plan_traffic(
        scenarios,
        request,
        question,
        format_=served_format(first, own_server),
        layout=layout,
        usd_per_hour=_prices_by_device(usd_per_hour, [scenario.device.name for scenario in scenarios]),
        notes=(*first.notes, *find_ignored_expert_split(first.config, layout)),
    )


def _prices_by_device(usd_per_hour: float | Mapping[str, float] | None, names: Sequence[str]) -> dict[str, float]:
    """Return the price of one device by its name; empty without prices. [USD/h]

    Args:
        usd_per_hour: Price of every device, or prices by name or alias. [USD/h]
        names: Names of all devices.

    Raises:
        WorkloadError: a device has no price, a price no device, or a price is out of range.
    """
    if usd_per_hour is None:
        return {}
    if not isinstance(usd_per_hour, Mapping):
        return dict.fromkeys(names, usd_per_hour)
    prices = {name if name in names else find_device(name).name: price for name, price in usd_per_hour.items()}
    if prices.keys() != set(names):
        raise WorkloadError(
            with_fields(
                "{usd_per_hour} has prices of {priced}, and the devices are {needed}; give one for each",
                priced=", ".join(prices) or "no device",
                needed=", ".join(names),
            ),
            field="usd_per_hour",
        )
    for price in prices.values():
        check_price(price)
    return prices


def _read_source(
    trace: str | Path | Traffic | None,
    arrivals: str | float | None,
    prompt_len: str | int | None,
    output_len: str | int | None,
    cached_len: int,
    num_requests: int | None,
    seed: int,
    burstiness: float,
) -> RandomTraffic | Traffic:
    """Return distributions, or the requests of a trace.

    Raises:
        WorkloadError: there is neither, both, or one that cannot be read.
    """
    from shapewright.optimize.serving.traffic.requests import RandomTraffic, Traffic, read_lengths
    from shapewright.optimize.serving.traffic.trace import read_trace

    if trace is not None:
        drawn = {
            "prompt_len": prompt_len is not None,
            "output_len": output_len is not None,
            "cached_len": bool(cached_len),
            "num_requests": num_requests is not None,
            "seed": bool(seed),
            "burstiness": burstiness != 1.0,
        }
        idle = next((name for name, is_given in drawn.items() if is_given), None)
        if idle:
            raise WorkloadError(
                with_fields("{idle} has no effect on a trace, which holds the requests", idle=FieldName(idle)),
                advice="leave it out",
                field=idle,
            )
        return trace if isinstance(trace, Traffic) else read_trace(trace)
    if arrivals is None or prompt_len is None or output_len is None:
        raise WorkloadError(
            with_fields("traffic needs arrivals, {prompt_len} and {output_len}, or a trace"),
            advice=with_fields("give for example arrivals 12/s, {prompt_len} lognormal:800,600 and {output_len} 200"),
        )
    given: dict[str, Any] = {} if num_requests is None else {"num_requests": num_requests}
    return RandomTraffic(
        prompts=read_lengths(prompt_len, "prompt_len"),
        answers=read_lengths(output_len, "output_len"),
        cached_len=cached_len,
        seed=seed,
        burstiness=burstiness,
        **given,
    )
