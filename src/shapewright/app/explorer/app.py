"""FastAPI application of the explorer: the page and the JSON API under /api/v1."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import anyio.to_thread
from fastapi import FastAPI, Path, Query, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

from shapewright import __version__
from shapewright.app.explorer.assets import TRACED_PAGE, load_assets, serve_asset
from shapewright.app.explorer.device_lookup import DeviceLookup
from shapewright.app.explorer.guard import Guard
from shapewright.app.explorer.lanes import (
    FAST_LIMIT_S,
    MAX_FAST_WAITING,
    MAX_WAITING,
    NUM_FAST_THREADS,
    SLOW_LIMIT_S,
    Lane,
    WorkerLane,
)
from shapewright.app.explorer.measured import Measurements
from shapewright.app.explorer.problems import (
    NOT_FOUND,
    OBJECT,
    PROBLEMS,
    QUEUE_FULL,
    describe_problems,
    install_handlers,
)
from shapewright.app.explorer.protocol import QuietLog
from shapewright.app.explorer.requests import (
    SLOW_REQUESTS,
    DesignRequestBody,
    ExplainRequest,
    JobRequest,
    PredictRequest,
    SearchRequestBody,
    TilesRequest,
    build_job_scenario,
    followed_fields,
    read_job_model,
)
from shapewright.app.explorer.search_jobs import MAX_RUN_S, PUBLIC_RUN_S, SearchQueue, SearchRun
from shapewright.app.explorer.views import answers, catalogue, figures
from shapewright.app.explorer.views.answers import Answer, TracedModule, answer_trace

API = "/api/v1"
# The report has inline scripts, so the browser must save it rather than show it under this origin.
_AS_FILE = {"Content-Disposition": 'attachment; filename="report.html"'}

# OpenAPI description shared by the routes that compute something from a job.
_ANSWER: dict[str, Any] = {
    "responses": {**PROBLEMS, **QUEUE_FULL, 200: {"description": "The answer.", "content": OBJECT}},
    "response_class": Response,
    "tags": ["predictions"],
}


def create_app(
    *,
    host: str = "127.0.0.1",
    token: str | None = None,
    queue: SearchQueue | None = None,
    measured: Measurements | None = None,
    devices: DeviceLookup | None = None,
    public_names: Collection[str] = (),
    frame_origins: Collection[str] = (),
    traced: TracedModule | None = None,
) -> FastAPI:
    """Create the application.

    Args:
        host: Name or address of the server, in addition to those of this machine.
        token: Access token that every request must carry; None for loopback.
        queue: Queue of searches; None for a default one.
        devices: Devices that requests can name; None for those of the package.
        public_names: Host names of a public server, which needs no token and has short searches.
        frame_origins: Origins whose pages may show the page in a frame.
        traced: A traced module, which has a page of its own.
    """
    devices, measured = devices or DeviceLookup(), measured or Measurements()
    searches = queue or SearchQueue(PUBLIC_RUN_S if public_names else MAX_RUN_S, calibration=devices.calibration)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_exception_handler(QuietLog())
        anyio.to_thread.current_default_thread_limiter().total_tokens = NUM_FAST_THREADS
        app.state.fast = Lane(NUM_FAST_THREADS, FAST_LIMIT_S, MAX_FAST_WAITING)
        app.state.slow = WorkerLane(SLOW_LIMIT_S, MAX_WAITING, calibration=devices.calibration, store=measured.path)
        app.state.traced = Lane(1, SLOW_LIMIT_S, MAX_WAITING)
        app.state.lanes = app.state.fast, app.state.slow, app.state.traced
        app.state.slow.warm_up()
        yield
        await app.state.slow.close()
        await searches.close()

    app = FastAPI(
        title="Shapewright",
        version=__version__,
        description="Which transformer shape fits your hardware, what a bad one costs, and what to use instead. "
        "Answers are those of the command line's --json (docs/json.md), with its printed text under `text`.",
        openapi_url=f"{API}/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        generate_unique_id_function=lambda route: route.name,
    )
    install_handlers(app)
    _add_fast_routes(app, measured, devices)
    _add_slow_routes(app)
    _add_csv_route(app, devices)
    _add_catalogue_routes(app, devices)
    _add_search_routes(app, searches, devices)
    if traced is not None:
        _add_trace_route(app, traced, devices)
    _add_page_routes(app, has_trace=traced is not None)
    describe_problems(app)
    app.add_middleware(Guard, host=host, token=token, public_names=public_names, frame_origins=frame_origins)
    return app


def _json(answer: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(answer, allow_nan=False), status_code=status, media_type="application/json")


def _add_fast_routes(app: FastAPI, measured: Measurements, devices: DeviceLookup) -> None:
    """Routes of single predictions, which a slider requests at every move."""

    @app.post(f"{API}/predict", summary="Time, throughput and memory of one step, by operation", **_ANSWER)
    async def predict(body: PredictRequest, request: Request) -> Response:
        def compute() -> Answer:
            baseline = None if body.baseline is None else build_job_scenario(body.baseline, devices)
            scenario = build_job_scenario(body.job, devices)
            return answers.answer_predict(scenario, followed_fields(body.job, scenario.config), baseline)

        return _json(await app.state.fast.run(request, compute))

    @app.post(f"{API}/explain", summary="Formula, inputs, source and calibration record of an operation", **_ANSWER)
    async def explain(body: ExplainRequest, request: Request) -> Response:
        def compute() -> Answer:
            return answers.answer_explain(build_job_scenario(body.job, devices), body.operation)

        return _json(await app.state.fast.run(request, compute))

    @app.post(f"{API}/tiles", summary="Tiles and waves of one GEMM", **_ANSWER)
    async def tiles(body: TilesRequest, request: Request) -> Response:
        def compute() -> Answer:
            scenario = build_job_scenario(body.job, devices)
            return figures.answer_tiles(scenario, body.operation, body.pass_name, measured)

        return _json(await app.state.fast.run(request, compute))

    @app.post(f"{API}/config", summary="The model as a config.json object, in the format of the input", **_ANSWER)
    async def config(body: JobRequest, request: Request) -> Response:
        def compute() -> Answer:
            return answers.answer_config(build_job_scenario(body.job, devices))

        return _json(await app.state.fast.run(request, compute))


def _add_slow_routes(app: FastAPI) -> None:
    """Routes that predict many steps; a worker process answers them one at a time."""
    page_route = {**_ANSWER, "responses": {**PROBLEMS, 200: {"description": "The page.", "content": {"text/html": {}}}}}

    def add(path: str, name: str, summary: str, route: dict[str, Any] = _ANSWER) -> None:
        media_type, headers = ("text/html", _AS_FILE) if route is page_route else ("application/json", {})

        async def answer(body: Any, request: Request) -> Response:  # noqa: ARG001 (read by the worker)
            found: Response = await app.state.slow.answer(request, path, media_type)
            if found.status_code == 200:
                found.headers.update(headers)
            return found

        answer.__annotations__["body"] = SLOW_REQUESTS[path]
        app.post(f"{API}/{path}", name=name, summary=summary, **route)(answer)

    add("check", "check", "Findings with their cost, and nearest better shapes")
    add("memory", "memory", "Memory by component and stage, largest sizes that fit, and remedies")
    add("compare", "compare", "The same job on several devices")
    add("breakdown", "breakdown", "Layers, roofline, waterfall and pipeline as figures")
    add("sweep", "sweep", "Time or throughput over one field, compared with the current value")
    add("plan", "plan", "Ways to distribute a training job over devices")
    add("serving", "serving_plan", "Ways to serve: front, recommended point, latency over load, launch lines")
    add("heat-map", "heat_map", "Model rate over numbers of heads and hidden sizes")
    add("report.html", "report", "Design review of the shape, as one self-contained page", page_route)


def _add_csv_route(app: FastAPI, devices: DeviceLookup) -> None:
    """Route of the operations table as a file."""
    csv_route = {**_ANSWER, "responses": {**PROBLEMS, 200: {"description": "The table.", "content": {"text/csv": {}}}}}

    @app.post(f"{API}/operations.csv", summary="Every operation as CSV", **csv_route)
    async def operations(body: JobRequest, request: Request) -> Response:
        table = await app.state.fast.run(request, lambda: answers.answer_csv(build_job_scenario(body.job, devices)))
        return Response(table, media_type="text/csv")


def _add_catalogue_routes(app: FastAPI, lookup: DeviceLookup) -> None:
    """Routes that list devices, models and rules."""
    route: dict[str, Any] = {
        "responses": {200: {"description": "The list.", "content": OBJECT}},
        "response_class": Response,
        "tags": ["catalogue"],
    }

    @app.get(API, summary="Version, and the fields of models, workloads and layouts", **route)
    def about() -> Response:
        return _json(catalogue.answer_about(lookup))

    @app.get(f"{API}/devices", summary="All devices with their data-sheet numbers and sources", **route)
    def devices() -> Response:
        return _json(catalogue.answer_devices(lookup))

    @app.get(f"{API}/models", summary="All presets with their shapes", **route)
    def models() -> Response:
        return _json(catalogue.answer_models())

    one = {**route, "responses": {**route["responses"], **NOT_FOUND}}

    @app.get(f"{API}/models/{{name}}", summary="One preset with its config.json", **one)
    def model(name: str = Path(max_length=200)) -> Response:
        try:
            return _json(catalogue.answer_model(name))
        except ValueError as error:
            raise HTTPException(404, str(error)) from None

    @app.get(f"{API}/rules", summary="All rules with their pages", **route)
    def rules() -> Response:
        return _json(catalogue.answer_rules())


def _add_search_routes(app: FastAPI, searches: SearchQueue, devices: DeviceLookup) -> None:
    """Routes that start, show and stop searches and designs."""
    route: dict[str, Any] = {"response_class": Response, "tags": ["searches"]}
    starting: dict[str, Any] = {
        "status_code": 202,
        "responses": {**PROBLEMS, **QUEUE_FULL, 202: {"description": "Waiting or running.", "content": OBJECT}},
        **route,
    }
    done: dict[int | str, dict[str, Any]] = {200: {"description": "State, progress and result.", "content": OBJECT}}

    def find(run_id: str) -> SearchRun:
        run = searches.find(run_id)
        if run is None:
            raise HTTPException(404, f"no search {ascii(run_id)[:40]}; old results are dropped: start it again")
        return run

    def start(kind: str, body: JobRequest) -> Response:
        run = searches.submit({"kind": kind, **body.model_dump(mode="json", exclude_unset=False)})
        answer = _json(run.to_json(), 202)
        answer.headers["Location"] = f"{API}/searches/{run.id}"
        return answer

    @app.post(f"{API}/searches", summary="Start a search for faster shapes of the same size", **starting)
    async def start_search(body: SearchRequestBody, request: Request) -> Response:
        # Reject jobs that cannot run at once.
        await app.state.fast.run(request, lambda: build_job_scenario(body.job, devices).predict())
        return start("search", body)

    @app.post(f"{API}/designs", summary="Start a design: shape, plan and run for a size and tokens", **starting)
    async def start_design(body: DesignRequestBody, request: Request) -> Response:
        def check() -> None:
            read_job_model(body.job)
            devices.find(body.job.device, **body.job.node_options)

        # Reject unknown models and devices at once.
        await app.state.fast.run(request, check)
        return start("design", body)

    @app.get(
        f"{API}/searches/{{run_id}}", summary="State of a search or a design", responses={**done, **NOT_FOUND}, **route
    )
    async def show_search(run_id: str = Path(max_length=64)) -> Response:
        return _json(find(run_id).to_json())

    @app.delete(
        f"{API}/searches/{{run_id}}",
        summary="Stop a search or a design; a running one returns its best so far",
        responses={**done, **NOT_FOUND},
        **route,
    )
    async def stop_search(run_id: str = Path(max_length=64)) -> Response:
        run = find(run_id)
        searches.cancel(run)
        return _json(run.to_json())


def _add_trace_route(app: FastAPI, traced: TracedModule, devices: DeviceLookup) -> None:
    """Route of the module that was traced before the server started; requests cannot trace."""

    @app.get(
        f"{API}/trace",
        summary="Step, findings and memory of the traced module",
        responses={**PROBLEMS, **QUEUE_FULL, 200: {"description": "The answer.", "content": OBJECT}},
        response_class=Response,
        tags=["predictions"],
    )
    async def trace(request: Request, device: str = Query(max_length=200)) -> Response:
        return _json(
            await app.state.traced.run(
                request, lambda: answer_trace(traced.trace, devices.find(device), traced.optimizer)
            )
        )


def _add_page_routes(app: FastAPI, *, has_trace: bool) -> None:
    """Routes of the page's files, each with a fixed path."""
    for path, asset in load_assets().items():
        if path == TRACED_PAGE and not has_trace:
            continue

        async def show(request: Request, asset: Any = asset) -> Response:
            return serve_asset(asset, request)

        app.router.routes.append(APIRoute(path, show, methods=["GET", "HEAD"], include_in_schema=False))
